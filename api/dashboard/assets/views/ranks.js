// Each rank's newest step as numbers: time, throughput, memory, bytes sent by kind and by the way they went
// (memory of the host, network), seconds by phase.

import { el, replace } from "../dom.js";
import { bytes, compact, duration, integer, words } from "../format.js";

export class RankTable {
  constructor() {
    this.element = el("div", {});
    this.update([]);
  }

  update(reports) {
    if (!reports.length) {
      replace(this.element, el("p", { class: "empty" }, "No rank has reported a step yet."));
      return;
    }
    const groups = GROUPS.map((group) => ({ ...group, names: names(reports, group.key) }));
    const scrolled = this.element.firstChild?.scrollLeft ?? 0;
    const region = el(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "Ranks at their newest step" },
      el(
        "table",
        { class: "ranks" },
        el("thead", {}, groupRow(groups), nameRow(groups)),
        el("tbody", {}, reports.map((report) => rankRow(report, groups))),
      ),
    );
    replace(this.element, region);
    region.scrollLeft = scrolled;
  }
}

// Columns that go together, one for each name that a rank's figures have.
const GROUPS = [
  { key: "bytes_sent", title: "bytes sent", show: bytes },
  { key: "bytes_by_transport", title: "of them through", show: bytes },
  { key: "seconds", title: "time by phase", show: duration },
];

// Kinds and phases in the order of a step; others follow.
const ORDER = ["forward", "backward", "reduce", "gather", "gather_backward", "optimizer", "control", "idle"];

// Names that would not be understood as they are.
const TITLES = { shared: "shared memory" };

function names(reports, key) {
  const found = new Set(reports.flatMap((report) => Object.keys(report[key])));
  return [...new Set([...ORDER.filter((name) => found.has(name)), ...found])];
}

function groupRow(groups) {
  return el(
    "tr",
    { class: "groups" },
    el("td", { colspan: 6 }),
    groups.map(({ title, names }) => el("th", { scope: "colgroup", colspan: Math.max(1, names.length) }, title)),
  );
}

function nameRow(groups) {
  const columns = ["rank", "worker", "step", "step time", "tokens/s", "resident"];
  columns.push(...groups.flatMap(({ names }) => or(names)));
  return el("tr", {}, columns.map((name) => el("th", { scope: "col" }, TITLES[name] ?? words(name))));
}

const or = (list) => (list.length ? list : ["–"]);

function rankRow(report, groups) {
  const cells = [
    integer(report.step),
    duration(report.step_s),
    compact(report.tokens / report.step_s),
    bytes(report.resident_bytes),
    ...groups.flatMap(({ key, show, names }) => or(names).map((name) => show(report[key][name]))),
  ];
  return el(
    "tr",
    { "data-rank": report.rank },
    el("th", { scope: "row" }, report.rank),
    el("td", { class: "text" }, report.worker),
    cells.map((text) => el("td", {}, text)),
  );
}
