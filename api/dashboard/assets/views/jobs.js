// The list of jobs, newest first, asked for again every few seconds.

import { latestRanks, listJobs } from "../api.js";
import { el, replace } from "../dom.js";
import { age, compact, dateTime, decimal, unixTime } from "../format.js";
import { ACTIVE, FINISHED } from "../job_model.js";
import { Poll } from "../poll.js";
import { loading, notice, progress, stateBadge, workersText } from "./parts.js";

const INTERVAL_MS = 2_000;
const PAGE = 25;
const MOST_RATES = 12; // jobs whose throughput is asked for in one round
const COLUMNS = ["Job", "State", "Progress", "Workers", "Loss", "Tokens/s", "Age"];
const STATES = [
  "queued",
  "starting",
  "running",
  "resizing",
  "recovering",
  "pausing",
  "paused",
  "cancelling",
  "succeeded",
  "failed",
  "cancelled",
];

export class JobsView {
  #pages = 1;
  #rates = new Map();

  constructor(context) {
    this.context = context;
    context.setTitle("Jobs");
    this.problem = el("div", {});
    this.body = el("div", {}, loading("Loading jobs…"));
    this.filter = el(
      "select",
      { id: "state-filter", onchange: () => this.#filtered() },
      el("option", { value: "" }, "all"),
      STATES.map((state) => el("option", { value: state }, state)),
    );
    this.element = el(
      "div",
      { class: "view" },
      el(
        "div",
        { class: "view-head" },
        el("h1", {}, "Jobs"),
        el("label", { class: "filter" }, "State", this.filter),
      ),
      this.problem,
      this.body,
    );
    context.setConnection("connecting", "connecting…");
    this.poll = new Poll((signal) => this.#refresh(signal), {
      interval_ms: INTERVAL_MS,
      onFailure: (error, retry_s) => this.#failed(error, retry_s),
    });
  }

  destroy() {
    this.poll.stop();
  }

  #filtered() {
    this.#pages = 1;
    this.poll.now();
  }

  async #refresh(signal) {
    const state = this.filter.value;
    const jobs = [];
    let cursor = null;
    for (let page = 0; page < this.#pages; page += 1) {
      const answer = await listJobs({ cursor, limit: PAGE, state, signal });
      jobs.push(...answer.jobs);
      cursor = answer.next_cursor;
      if (cursor === null) break;
    }
    await this.#askRates(jobs, signal);
    if (state !== this.filter.value) return;
    replace(this.problem);
    this.context.setConnection("live", "live");
    this.#draw(jobs, cursor !== null);
  }

  // Throughput is in the ranks' reports: asked for jobs that make progress only.
  async #askRates(jobs, signal) {
    const active = jobs.filter((job) => ACTIVE.has(job.state) && job.step > 0).slice(0, MOST_RATES);
    const reports = await Promise.allSettled(active.map((job) => latestRanks(job.id, { signal })));
    this.#rates = new Map(
      active.map((job, index) => [job.id, throughput(reports[index].value)]),
    );
  }

  #failed(error, retry_s) {
    this.context.onError(error);
    this.context.setConnection("lost", "disconnected");
    replace(this.problem, notice("error", "The list is not up to date", `${error.message} Trying again in ${retry_s} s.`));
    if (this.body.querySelector(".loading")) replace(this.body);
  }

  #draw(jobs, more) {
    if (!jobs.length) {
      replace(this.body, this.#nothing());
      return;
    }
    const focused = document.activeElement?.dataset?.job;
    replace(
      this.body,
      el(
        "div",
        { class: "card flush" },
        el(
          "table",
          { class: "jobs" },
          el("caption", { class: "hidden-text" }, "Jobs, newest first"),
          el("thead", {}, el("tr", {}, COLUMNS.map((name) => el("th", { scope: "col" }, name)))),
          el("tbody", {}, jobs.map((job) => this.#row(job))),
        ),
      ),
      more ? el("button", { type: "button", class: "more", onclick: () => this.#more() }, "Show older jobs") : null,
    );
    if (focused) this.body.querySelector(`a[data-job="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }

  #row(job) {
    const created = unixTime(job.created_at);
    const cell = (index, ...children) => el("td", { "data-label": COLUMNS[index] }, children);
    return el(
      "tr",
      {},
      el(
        "th",
        { scope: "row" },
        el("a", { href: `#/jobs/${encodeURIComponent(job.id)}`, "data-job": job.id }, job.name),
        el("small", {}, job.id),
      ),
      cell(1, stateBadge(job.state)),
      cell(2, progress(job.step, job.steps)),
      cell(3, workersText(job.workers, { finished: FINISHED.has(job.state) })),
      cell(4, decimal(job.loss)),
      cell(5, compact(this.#rates.get(job.id))),
      cell(6, el("time", { title: dateTime(created) }, age(created))),
    );
  }

  #nothing() {
    if (this.filter.value) return el("p", { class: "empty" }, `No job is ${this.filter.value}.`);
    return el(
      "div",
      { class: "empty" },
      el("p", {}, "No job has been submitted yet."),
      el("p", {}, "Submit one from a terminal:"),
      el("pre", {}, "elastic-zero submit job.yaml"),
    );
  }

  #more() {
    this.#pages += 1;
    this.poll.now();
  }
}

// Tokens per second of the whole group, from each rank's newest report.
function throughput(reports) {
  if (!reports?.length) return null;
  const tokens = reports.reduce((sum, report) => sum + report.tokens, 0);
  return tokens / Math.max(...reports.map((report) => report.step_s));
}
