// Small pieces that several views show: notices, state badges, progress, figures.

import { el } from "../dom.js";
import { integer, words } from "../format.js";

// tone: "error", "warning" or "info". `extra`: nodes below the text.
export function notice(tone, title, text, extra = []) {
  return el(
    "div",
    { class: `notice notice-${tone}`, role: tone === "error" ? "alert" : "status" },
    el("strong", {}, title),
    text ? el("p", {}, text) : null,
    extra,
  );
}

export const loading = (text) => el("p", { class: "empty loading", role: "status" }, text);

export const stateBadge = (state) => el("span", { class: `badge state-${state}` }, words(state));

// Progress as a bar and as text.
export function progress(done, total) {
  return el(
    "div",
    { class: "progress" },
    el("progress", { max: total, value: Math.min(done, total), "aria-label": `step ${done} of ${total}` }),
    el("span", {}, integer(done), el("small", {}, ` / ${integer(total)}`)),
  );
}

// A figure with its name: the value is a text or a node.
export function figure(name, value, note = null) {
  return el(
    "div",
    { class: "figure" },
    el("dt", {}, name),
    el("dd", {}, value, note ? el("small", {}, note) : null),
  );
}

export const section = (title, ...children) =>
  el("section", { class: "card" }, el("h2", {}, title), children);

// What there is, and after a slash what is wanted where that is another number.
export function workersText({ current, wanted }, { finished }) {
  if (finished) return "–";
  return current === wanted ? String(current) : `${current} / ${wanted}`;
}
