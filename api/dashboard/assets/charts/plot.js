// The drawn parts of a line chart: where things are, axes, line, band. Pure but for making SVG nodes.

import { svg } from "../dom.js";
import { bare, integer } from "../format.js";
import { domain, linear, ticks } from "./scale.js";

export const HEIGHT = 220;
const MARGIN = { top: 36, right: 14, bottom: 28, left: 58 };
const Y_TICKS = 5;
const X_TICK_ROOM = 100;

// The box of the plot in pixels, its ticks, and `x` and `y` from steps and values to pixels.
export function layOut(points, { width, zero }) {
  const first = points[0].step;
  const last = points.at(-1).step;
  const low = Math.min(...points.map(({ min }) => min));
  const high = Math.max(...points.map(({ max }) => max));
  const [bottom, top] = domain(low, high, { zero });
  const box = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: HEIGHT - MARGIN.bottom };
  return {
    ...box,
    first,
    last,
    yTicks: ticks(bottom, top, Y_TICKS),
    xTicks: ticks(first, last, Math.max(2, Math.floor(width / X_TICK_ROOM))).filter(Number.isInteger),
    x: linear(first, last, box.left, box.right),
    y: linear(bottom, top, box.bottom, box.top),
  };
}

export function drawAxes(layout, format) {
  const { left, right, bottom, x, y, xTicks, yTicks } = layout;
  return svg(
    "g",
    { class: "axes", "aria-hidden": "true" },
    yTicks.map((value) => [
      svg("line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) }),
      svg("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, bare(format(value))),
    ]),
    svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }),
    xTicks.map((value, index) =>
      svg(
        "text",
        { x: x(value), y: bottom + 19, "text-anchor": anchor(x(value), layout) },
        index === 0 ? `step ${integer(value)}` : integer(value),
      ),
    ),
  );
}

function anchor(x, { left, right }) {
  if (x > right - 20) return "end";
  return x < left + 20 ? "start" : "middle";
}

export function drawLine(points, layout) {
  if (points.length === 1) return drawDot(points[0], layout);
  return svg("path", { class: "line", d: path(points, ({ mean }) => mean, layout) });
}

// From the smallest to the largest value where a point stands for several steps.
export function drawBand(points, layout) {
  if (!points.some(({ count }) => count > 1)) return null;
  const upper = path(points, ({ max }) => max, layout);
  const lower = path([...points].reverse(), ({ min }) => min, layout);
  return svg("path", { class: "band", d: `${upper}L${lower.slice(1)}Z` });
}

export function drawDot(point, layout) {
  return svg("circle", { class: "dot", cx: layout.x(point.step), cy: layout.y(point.mean), r: 4 });
}

const path = (points, value, { x, y }) =>
  points.map((point, index) => `${index ? "L" : "M"}${x(point.step).toFixed(1)} ${y(value(point)).toFixed(1)}`).join("");

// Index of the point nearest to pixel `at`; the points are in order of their steps.
export function nearest(points, at, { x }) {
  let low = 0;
  let high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x(points[middle].step) < at) low = middle;
    else high = middle;
  }
  return Math.abs(x(points[low].step) - at) <= Math.abs(x(points[high].step) - at) ? low : high;
}
