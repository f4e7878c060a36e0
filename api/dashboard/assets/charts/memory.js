// Each rank's memory by category: a stacked bar of what is measured above a thinner one of what was predicted,
// on one scale for all ranks, with a legend and the same numbers as a table.

import { el, replace, svg } from "../dom.js";
import { bytes, words } from "../format.js";
import { ticks } from "./scale.js";

export const CATEGORIES = [
  "parameters",
  "gradients",
  "optimizer_states",
  "communication_buffers",
  "activations",
  "padding",
  "replicas",
  "save_copy",
  "unattributed",
];
const UNITS = 1000; // of a bar's own coordinate system, over its whole width

export function memoryTotal(memory) {
  return CATEGORIES.reduce((sum, name) => sum + Math.max(0, memory[name] ?? 0), 0);
}

export class MemoryChart {
  constructor() {
    this.legend = el("ul", { class: "legend" });
    this.bars = el("div", { class: "memory-bars" });
    this.empty = el("p", { class: "empty" }, "No rank has reported its memory yet.");
    this.table = el("details", { class: "chart-table", ontoggle: () => this.#drawTable() });
    this.table.append(el("summary", {}, "Values as a table"));
    this.element = el("div", { class: "memory" }, this.legend, this.bars, this.empty, this.table);
    this.reports = [];
    replace(
      this.legend,
      CATEGORIES.map((name) => el("li", {}, el("span", { class: `swatch cat-${name}`, "aria-hidden": "true" }), words(name))),
      el("li", { class: "legend-note" }, "thick bar: measured, thin bar: predicted"),
    );
    this.update([]);
  }

  // `reports`: each rank's newest report, by rank.
  update(reports) {
    this.reports = reports;
    const some = reports.length > 0;
    this.empty.hidden = some;
    this.legend.hidden = !some;
    this.bars.hidden = !some;
    this.table.hidden = !some;
    const largest = Math.max(1, ...reports.flatMap((r) => [memoryTotal(r.memory), memoryTotal(r.predicted)]));
    const scale = largest * 1.02;
    replace(this.bars, reports.map((report) => rankBars(report, scale)), axis(scale));
    this.#drawTable();
  }

  #drawTable() {
    while (this.table.childNodes.length > 1) this.table.lastChild.remove();
    if (!this.table.open) return;
    this.table.append(memoryTable(this.reports));
  }
}

function rankBars(report, scale) {
  const measured = memoryTotal(report.memory);
  const predicted = memoryTotal(report.predicted);
  return el(
    "div",
    { class: "rank-memory", "data-rank": report.rank },
    el("span", { class: "rank-name" }, `rank ${report.rank}`, el("small", {}, report.worker)),
    el(
      "div",
      { class: "bar-pair" },
      bar(report.memory, scale, { name: "measured", label: `Rank ${report.rank}, measured` }),
      bar(report.predicted, scale, { name: "predicted", label: `Rank ${report.rank}, predicted` }),
    ),
    el(
      "span",
      { class: "rank-total" },
      el("strong", {}, bytes(measured)),
      el("small", {}, `predicted ${bytes(predicted)}`),
    ),
  );
}

function bar(memory, scale, { name, label }) {
  let start = 0;
  const parts = [];
  for (const category of CATEGORIES) {
    const size = Math.max(0, memory[category] ?? 0);
    if (!size) continue;
    const width = (size / scale) * UNITS;
    parts.push(
      svg(
        "rect",
        { class: `cat-${category}`, x: start, y: 0, width, height: 10, "data-category": category, "data-bytes": size },
        svg("title", {}, `${name}: ${words(category)} ${bytes(size)}`),
      ),
    );
    start += width;
  }
  const text = parts.length
    ? CATEGORIES.filter((category) => memory[category]).map((category) => `${words(category)} ${bytes(memory[category])}`)
    : ["nothing"];
  return svg(
    "svg",
    {
      class: `bar bar-${name}`,
      viewBox: `0 0 ${UNITS} 10`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": `${label}: ${text.join(", ")}`,
    },
    parts,
  );
}

function axis(scale) {
  const line = el("div", { class: "memory-axis", "aria-hidden": "true" });
  for (const value of ticks(0, scale, 4, { base: 2 })) {
    const mark = el("span", {}, bytes(value));
    mark.style.setProperty("left", `${(value / scale) * 100}%`);
    line.append(mark);
  }
  return el("div", { class: "memory-axis-row" }, el("span", {}), line, el("span", {}));
}

function memoryTable(reports) {
  const head = ["Rank", "", ...CATEGORIES.map(words), "sum", "resident", "fragmentation"];
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Memory of each rank, values" },
    el(
      "table",
      {},
      el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))),
      el(
        "tbody",
        {},
        reports.flatMap((report) => [
          memoryRow(report, "measured", report.memory, [report.resident_bytes, report.memory.fragmentation ?? 0].map(bytes)),
          memoryRow(report, "predicted", report.predicted, ["", ""]),
        ]),
      ),
    ),
  );
}

// `process`: resident and fragmentation, which are of another moment than the categories and no part of their sum.
function memoryRow(report, name, memory, process) {
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, report.rank),
    el("td", { class: "text" }, name),
    CATEGORIES.map((category) => el("td", {}, bytes(memory[category] ?? 0))),
    el("td", {}, bytes(memoryTotal(memory))),
    process.map((text) => el("td", {}, text)),
  );
}
