// Marks of resizes, recoveries and checkpoints on a line chart: lines with labels for what changed the group,
// small ticks on the axis for checkpoints. Pure but for making SVG nodes.

import { el, svg } from "../dom.js";

const CHARACTER = 7.5; // width of one in a label, in pixels
const LABEL_GAP = 8;
const TICK_ROOM = 4;
const NEAR = 7;

// SVG of the markers within the drawn steps; `layout` is that of the chart. Of marks on one pixel one is drawn.
export function drawMarkers(markers, layout) {
  const visible = markers.filter(({ step }) => step >= layout.first && step <= layout.last);
  return svg(
    "g",
    { class: "markers", "aria-hidden": "true" },
    spaced(visible.filter(({ kind }) => kind === "checkpoint"), TICK_ROOM, layout).map((marker) => tick(marker, layout)),
    // A recovery goes back to a step where something else may be marked: its labels have a row of their own.
    changes(visible.filter(({ kind }) => kind === "resize"), { layout, labels: layout.top - 25 }),
    changes(visible.filter(({ kind }) => kind === "recovery"), { layout, labels: layout.top - 10 }),
  );
}

// What the marks mean.
export function markerLegend() {
  const line = (kind, name) => [
    svg("svg", { viewBox: "0 0 14 14", "aria-hidden": "true", class: `mark mark-${kind}` }, svg("line", { x1: 7, x2: 7, y1: 0, y2: 14 })),
    name,
  ];
  const checkpoint = svg("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" }, svg("path", { class: "mark-checkpoint", d: "M3 11h8l-4 -7z" }));
  return el(
    "ul",
    { class: "curve-legend" },
    [line("resize", "resize"), line("recovery", "recovery"), [checkpoint, "checkpoint"]].map((content) => el("li", {}, content)),
  );
}

// The markers within a few pixels of a step.
export function markersNear(markers, step, layout) {
  return markers.filter((marker) => Math.abs(layout.x(marker.step) - layout.x(step)) <= NEAR).slice(-4);
}

function tick(marker, { x, bottom }) {
  const at = x(marker.step);
  return svg("path", { class: "mark mark-checkpoint", d: `M${at - 3.5} ${bottom + 1}h7l-3.5 -6z` });
}

function changes(markers, { layout, labels }) {
  let taken = -Infinity; // right edge of the last label
  return markers.map((marker) => {
    const at = layout.x(marker.step);
    const half = (marker.label.length * CHARACTER) / 2;
    const room = at - half >= taken + LABEL_GAP;
    if (room) taken = at + half;
    const edge = at > layout.right - 16 ? "end" : at < layout.left + 16 ? "start" : "middle";
    return svg(
      "g",
      { class: `mark mark-${marker.kind}`, "data-step": marker.step },
      svg("line", { x1: at, x2: at, y1: labels + 4, y2: layout.bottom }),
      room ? svg("text", { x: at, y: labels, "text-anchor": edge }, marker.label) : null,
    );
  });
}

function spaced(markers, room, { x }) {
  let last = -Infinity;
  return markers.filter(({ step }) => {
    const keep = x(step) - last >= room;
    if (keep) last = x(step);
    return keep;
  });
}
