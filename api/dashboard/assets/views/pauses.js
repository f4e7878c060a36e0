// What each change of the group cost: why it was, the workers before and after, the pause by phase, what moved.

import { el, replace } from "../dom.js";
import { bytes, duration, integer, words } from "../format.js";

// Phases in the order in which they come; others follow.
const ORDER = ["wait", "stop", "form", "start", "move", "load"];

export class PauseTable {
  #shown = 0;

  constructor() {
    this.element = el("div", {});
    replace(this.element, el("p", { class: "empty" }, "The group has not changed yet."));
  }

  // `pauses`: events of the kinds `resize` and `recovery`, oldest first; the newest is shown first.
  update(pauses) {
    const newest = pauses.at(-1)?.id ?? 0;
    if (newest === this.#shown) return;
    this.#shown = newest;
    const found = new Set(pauses.flatMap(({ data }) => Object.keys(data.seconds ?? {})));
    const phases = [...new Set([...ORDER.filter((name) => found.has(name)), ...found])];
    const head = ["Step", "change", "why", "workers", "pause", ...phases, "bytes moved", "steps repeated", "state from"];
    replace(
      this.element,
      el(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": "Pauses by phase" },
        el(
          "table",
          { class: "ranks pauses" },
          el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, words(name))))),
          el("tbody", {}, pauses.toReversed().map((pause) => row(pause, phases))),
        ),
      ),
    );
  }
}

function row({ kind, data }, phases) {
  const cells = [
    `${data.old_workers} → ${data.new_workers}`,
    duration(data.pause_s),
    ...phases.map((name) => duration(data.seconds?.[name])),
    bytes(data.bytes_moved),
    integer(data.steps_repeated ?? data.steps_lost),
    data.source ? words(data.source) : "–",
  ];
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, integer(data.at_step)),
    el("td", { class: "text" }, words(kind)),
    el("td", { class: "text wrap" }, data.cause ?? (data.who ? `by ${data.who}` : "–")),
    cells.map((text) => el("td", {}, text)),
  );
}
