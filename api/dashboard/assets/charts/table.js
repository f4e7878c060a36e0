// A chart's values as a table, folded away until someone asks; drawn only while it is open.

import { el, replace } from "../dom.js";

const ROWS = 25;

export class ValueTable {
  #rows = [];

  constructor(title) {
    this.body = el("tbody", {});
    this.element = el(
      "details",
      { class: "chart-table", ontoggle: () => this.#draw() },
      el("summary", {}, "Values as a table"),
      el(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": `${title}, values` },
        el(
          "table",
          {},
          el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Step"), el("th", { scope: "col" }, title))),
          this.body,
        ),
      ),
    );
  }

  // `rows`: [step, value] as texts, oldest first. Evenly spaced ones are shown, and always the newest.
  update(rows) {
    const every = Math.max(1, Math.ceil(rows.length / ROWS));
    this.#rows = rows.filter((_, index) => (rows.length - 1 - index) % every === 0);
    this.#draw();
  }

  #draw() {
    if (!this.element.open) return;
    replace(
      this.body,
      this.#rows.map(([step, value]) => el("tr", {}, el("th", { scope: "row" }, step), el("td", {}, value))),
    );
  }
}
