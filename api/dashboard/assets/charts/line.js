// A line chart of one value over steps, with a band from smallest to largest where steps are merged, marks for
// what happened, a cursor for pointer and arrow keys, and the same numbers as a table.
//
// `new LineChart({title, unit, format, tone, zero})`, put `chart.element` on the page, `chart.update({points,
// newest, markers})` as often as there is news, `chart.destroy()` at the end. Points are those of Series.points().

import { el, replace, setText, svg } from "../dom.js";
import { integer } from "../format.js";
import { drawMarkers, markersNear } from "./markers.js";
import { HEIGHT, drawAxes, drawBand, drawDot, drawLine, layOut, nearest } from "./plot.js";
import { ValueTable } from "./table.js";

const POINTS_PER_PIXEL = 0.5;
let serial = 0;

export class LineChart {
  #points = [];
  #markers = [];
  #width = 0;
  #cursor = null; // index of the point under the cursor; null: no cursor
  #layout = null;

  constructor({ title, unit, format, tone, zero = false }) {
    Object.assign(this, { title, unit, format, tone, zero });
    const id = `chart-${(serial += 1)}`;
    this.heading = el("h3", { id: `${id}-title` }, title, unit ? el("span", { class: "unit" }, ` ${unit}`) : null);
    this.newest = el("output", { class: "chart-newest" });
    this.plot = svg("svg", { class: `plot tone-${tone}`, role: "img", "aria-labelledby": `${id}-name ${id}-desc` });
    this.name = svg("title", { id: `${id}-name` }, title);
    this.description = svg("desc", { id: `${id}-desc` });
    this.tip = el("div", { class: "tip", hidden: true });
    this.slider = el("div", {
      class: "chart-cursor",
      role: "slider",
      tabindex: "0",
      "aria-labelledby": `${id}-title`,
      "aria-valuetext": "no data yet",
      onkeydown: (event) => this.#onKey(event),
      onpointermove: (event) => this.#onPointer(event),
      onpointerdown: (event) => this.#onPointer(event),
      onpointerleave: () => this.#moveTo(null),
      onfocus: () => this.#moveTo(this.#cursor ?? this.#points.length - 1),
      onblur: () => this.#moveTo(null),
    });
    this.stage = el("div", { class: "chart-stage" }, this.plot, this.slider, this.tip);
    this.empty = el("p", { class: "empty chart-empty" }, "No step has been reported yet.");
    this.table = new ValueTable(title);
    this.element = el(
      "figure",
      { class: "chart", role: "group", "aria-labelledby": `${id}-title` },
      el("figcaption", {}, this.heading, this.newest),
      this.stage,
      this.empty,
      this.table.element,
    );
    this.resizes = new ResizeObserver(([entry]) => this.#resized(entry.contentRect.width));
    this.resizes.observe(this.stage);
    this.#draw();
  }

  update({ points, newest, markers }) {
    this.#points = points;
    setText(this.newest, points.length ? this.format(newest) : "");
    this.#markers = markers;
    if (this.#cursor !== null) this.#cursor = Math.min(this.#cursor, points.length - 1);
    this.#draw();
  }

  // How many points are worth handing to `update` at the present width.
  get resolution() {
    return Math.max(100, Math.floor(this.#width * POINTS_PER_PIXEL));
  }

  destroy() {
    this.resizes.disconnect();
  }

  #resized(width) {
    if (Math.abs(width - this.#width) < 1) return;
    this.#width = width;
    this.#draw();
  }

  #draw() {
    const some = this.#points.length > 0;
    this.empty.hidden = some;
    this.stage.hidden = !some;
    this.table.element.hidden = !some;
    if (!some || this.#width < 50) return;
    this.#layout = layOut(this.#points, { width: this.#width, zero: this.zero });
    this.plot.setAttribute("viewBox", `0 0 ${this.#width} ${HEIGHT}`);
    replace(
      this.plot,
      this.name,
      this.description,
      drawAxes(this.#layout, this.format),
      drawMarkers(this.#markers, this.#layout),
      drawBand(this.#points, this.#layout),
      drawLine(this.#points, this.#layout),
      this.#cursorMarks(),
    );
    setText(this.description, this.#summary());
    this.#drawTip();
    this.table.update(this.#points.map((point) => [integer(point.step), this.#valueText(point)]));
  }

  #cursorMarks() {
    const point = this.#points[this.#cursor];
    if (!point) return null;
    const x = this.#layout.x(point.step);
    return [
      svg("line", { class: "crosshair", x1: x, x2: x, y1: this.#layout.top, y2: this.#layout.bottom }),
      drawDot(point, this.#layout),
    ];
  }

  #summary() {
    const { first, last } = this.#layout;
    const values = this.#points.map(({ mean }) => mean);
    return (
      `${this.title} from step ${first} to ${last}: first ${this.format(values[0])}, ` +
      `newest ${this.newest.textContent}, smallest ${this.format(Math.min(...this.#points.map((p) => p.min)))}, ` +
      `largest ${this.format(Math.max(...this.#points.map((p) => p.max)))}.`
    );
  }

  #onPointer(event) {
    if (!this.#points.length || !this.#layout) return;
    const x = event.clientX - this.slider.getBoundingClientRect().left;
    this.#moveTo(nearest(this.#points, x, this.#layout));
  }

  #onKey(event) {
    const end = this.#points.length - 1;
    const at = this.#cursor ?? end;
    const page = Math.max(1, Math.round(end / 10));
    const target = {
      ArrowLeft: at - 1,
      ArrowDown: at - 1,
      ArrowRight: at + 1,
      ArrowUp: at + 1,
      PageDown: at - page,
      PageUp: at + page,
      Home: 0,
      End: end,
      Escape: null,
    }[event.key];
    if (target === undefined || end < 0) return;
    event.preventDefault();
    this.#moveTo(target === null ? null : Math.min(end, Math.max(0, target)));
  }

  #moveTo(index) {
    if (index === this.#cursor || (index !== null && index < 0)) return;
    this.#cursor = index;
    this.#draw();
  }

  #drawTip() {
    const { first, last, x, y } = this.#layout;
    const at = this.#points[this.#cursor];
    const shown = at ?? this.#points.at(-1);
    this.slider.setAttribute("aria-valuemin", first);
    this.slider.setAttribute("aria-valuemax", last);
    this.slider.setAttribute("aria-valuenow", shown.step);
    this.slider.setAttribute("aria-valuetext", `step ${shown.step}: ${this.#valueText(shown)}`);
    this.tip.hidden = !at;
    if (!at) return;
    replace(
      this.tip,
      el("strong", {}, `Step ${integer(at.step)}`),
      el("span", {}, this.#valueText(at)),
      markersNear(this.#markers, at.step, this.#layout).map(({ text }) => el("span", { class: "tip-note" }, text)),
    );
    const left = x(at.step);
    this.tip.classList.toggle("flip", left > this.#width / 2);
    this.tip.style.setProperty("--x", `${left}px`);
    this.tip.style.setProperty("--y", `${Math.min(y(at.mean), HEIGHT - 90)}px`);
  }

  #valueText({ mean, min, max, count }) {
    if (count === 1) return this.format(mean);
    return `${this.format(mean)} (${this.format(min)} to ${this.format(max)} over ${count} steps)`;
  }
}
