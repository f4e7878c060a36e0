// Each rank's newest step as numbers: time, throughput, memory, bytes sent by kind, seconds by phase.

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
    const kinds = names(reports, "bytes_sent");
    const phases = names(reports, "seconds");
    const scrolled = this.element.firstChild?.scrollLeft ?? 0;
    const region = el(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "Ranks at their newest step" },
      el(
        "table",
        { class: "ranks" },
        el("thead", {}, groupRow(kinds, phases), nameRow(kinds, phases)),
        el("tbody", {}, reports.map((report) => rankRow(report, kinds, phases))),
      ),
    );
    replace(this.element, region);
    region.scrollLeft = scrolled;
  }
}

// Kinds and phases in the order of a step; others follow.
const ORDER = ["forward", "backward", "reduce", "gather", "gather_backward", "optimizer", "control", "idle"];

function names(reports, key) {
  const found = new Set(reports.flatMap((report) => Object.keys(report[key])));
  return [...new Set([...ORDER.filter((name) => found.has(name)), ...found])];
}

function groupRow(kinds, phases) {
  return el(
    "tr",
    { class: "groups" },
    el("td", { colspan: 6 }),
    el("th", { scope: "colgroup", colspan: Math.max(1, kinds.length) }, "bytes sent"),
    el("th", { scope: "colgroup", colspan: Math.max(1, phases.length) }, "time by phase"),
  );
}

function nameRow(kinds, phases) {
  const columns = ["rank", "worker", "step", "step time", "tokens/s", "resident", ...or(kinds), ...or(phases)];
  return el("tr", {}, columns.map((name) => el("th", { scope: "col" }, words(name))));
}

const or = (list) => (list.length ? list : ["–"]);

function rankRow(report, kinds, phases) {
  const cells = [
    integer(report.step),
    duration(report.step_s),
    compact(report.tokens / report.step_s),
    bytes(report.resident_bytes),
    ...or(kinds).map((kind) => bytes(report.bytes_sent[kind])),
    ...or(phases).map((phase) => duration(report.seconds[phase])),
  ];
  return el(
    "tr",
    { "data-rank": report.rank },
    el("th", { scope: "row" }, report.rank),
    el("td", { class: "text" }, report.worker),
    cells.map((text) => el("td", {}, text)),
  );
}
