// A job's events, newest first; more of them on request. Nodes are made once for each event.

import { el, replace } from "../dom.js";
import { clock, dateTime, unixTime, words } from "../format.js";
import { eventText, eventTone } from "../job_events.js";

const FIRST = 30;
const MORE = 100;

export class EventList {
  #shown = FIRST;
  #items = new Map();
  #events = [];
  #dropped = 0;

  constructor() {
    this.list = el("ol", { class: "events", reversed: true });
    this.foot = el("p", { class: "events-foot" });
    this.element = el("div", {}, this.list, this.foot);
    this.update([], 0);
  }

  // `events` oldest first; `dropped`: how many older ones are no longer kept.
  update(events, dropped) {
    this.#events = events;
    this.#dropped = dropped;
    const visible = events.slice(-this.#shown).reverse();
    const kept = new Map(visible.map((event) => [event.id, this.#items.get(event.id) ?? item(event)]));
    this.#items = kept;
    const nodes = [...kept.values()];
    if (nodes.length !== this.list.childNodes.length || nodes.some((node, i) => node !== this.list.childNodes[i])) {
      replace(this.list, nodes);
    }
    this.#drawFoot(events.length - visible.length);
  }

  #drawFoot(hidden) {
    if (!this.#events.length) {
      replace(this.foot, el("span", { class: "empty" }, "Nothing has happened yet."));
    } else if (hidden) {
      replace(this.foot, el("button", { type: "button", onclick: () => this.#more() }, `Show older events (${hidden})`));
    } else {
      replace(this.foot, this.#dropped ? `${this.#dropped} older events are not kept on this page.` : null);
    }
  }

  #more() {
    this.#shown += MORE;
    this.update(this.#events, this.#dropped);
  }
}

function item(event) {
  const time = unixTime(event.time);
  return el(
    "li",
    { class: `event tone-${eventTone(event)}`, "data-kind": event.kind },
    el("time", { title: dateTime(time) }, clock(time)),
    el("span", { class: "event-kind" }, words(event.kind)),
    el("span", { class: "event-text" }, eventText(event)),
    event.data.traceback
      ? el("details", {}, el("summary", {}, "traceback"), el("pre", { class: "traceback" }, event.data.traceback))
      : null,
  );
}
