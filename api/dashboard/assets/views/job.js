// One job: loads its history from the REST routes, goes on with the stream, and lays out what is shown.

import { ApiError, eventPages, getJob, latestRanks, rankPages } from "../api.js";
import { LineChart } from "../charts/line.js";
import { markerLegend } from "../charts/markers.js";
import { MemoryChart } from "../charts/memory.js";
import { el, replace, throttled } from "../dom.js";
import { decimal, compact, duration } from "../format.js";
import { FINISHED, JobModel } from "../job_model.js";
import { JobStream } from "../stream.js";
import { EventList } from "./events.js";
import { JobHead } from "./job_head.js";
import { PauseTable } from "./pauses.js";
import { RankTable } from "./ranks.js";
import { SpecCard } from "./spec.js";
import { loading, notice, section } from "./parts.js";

const DRAW_EVERY_MS = 250;
const RETRY_MS = 5_000;

export class JobView {
  #abort = new AbortController();
  #draw = throttled(() => this.#drawNow(), DRAW_EVERY_MS);
  #stream = null;
  #retry = null;
  #nextReport = 0;

  constructor(context, jobId) {
    this.context = context;
    this.jobId = jobId;
    this.model = new JobModel();
    this.problem = el("div", {});
    this.body = el("div", { class: "job-body" }, loading("Loading the job…"));
    this.element = el(
      "div",
      { class: "view" },
      el("nav", { class: "crumbs", "aria-label": "Where this is" }, el("a", { href: "#/jobs" }, "Jobs"), ` / ${jobId}`),
      this.problem,
      this.body,
    );
    context.setTitle(jobId);
    this.#load();
  }

  destroy() {
    this.#abort.abort();
    this.#draw.cancel();
    clearTimeout(this.#retry);
    this.#stream?.close();
    for (const chart of this.charts ?? []) chart.destroy();
  }

  // History first, then the stream from where the reports' history ends. The events are asked for last, so that
  // none falls between; what comes twice the model passes over.
  async #load() {
    const signal = this.#abort.signal;
    this.context.setConnection("connecting", "loading…");
    try {
      this.model.applyJob(await getJob(this.jobId, { signal }));
      if (!this.charts) this.#build();
      await this.#loadHistory(signal);
    } catch (error) {
      if (!signal.aborted) this.#failed(error);
      return;
    }
    replace(this.problem);
    this.#draw();
    if (FINISHED.has(this.model.job.state)) this.#ended();
    else this.#openStream();
  }

  async #loadHistory(signal) {
    for (const report of await latestRanks(this.jobId, { signal })) this.model.applyLatest(report);
    if (this.model.ranks.size) {
      for await (const { items, next } of rankPages(this.jobId, 0, { after: this.#nextReport, signal })) {
        for (const report of items) this.model.applyReport(report);
        this.#nextReport = next;
        this.#draw();
      }
    }
    for await (const { items } of eventPages(this.jobId, { after: this.model.lastEventId, signal })) {
      for (const event of items) this.model.applyEvent(event);
      this.#draw();
    }
  }

  #openStream() {
    this.#stream = new JobStream(this.jobId, {
      after: this.#nextReport,
      onEntry: (name, data, id) => this.#received(name, data, id),
      onState: (state, details) => this.#connected(state, details),
    });
    this.#stream.open();
  }

  #received(name, data, id) {
    if (name === "job") this.model.applyJob(data);
    else if (name === "event") this.model.applyEvent(data);
    else this.model.applyReport(data);
    if (id > this.#nextReport) this.#nextReport = id;
    this.#draw();
    if (name === "job" && FINISHED.has(data.state)) this.#finish();
  }

  // The job is over: what is still on its way is read once more from the REST routes.
  #finish() {
    const stream = this.#stream;
    this.#stream = null;
    stream?.close();
    this.#load();
  }

  #ended() {
    this.context.setConnection("ended", "finished");
    this.#draw();
  }

  #connected(state, { error, retry_s }) {
    if (!this.#stream) return;
    if (state === "live") {
      replace(this.problem);
      this.context.setConnection("live", "live");
    } else if (state === "connecting") {
      this.context.setConnection("connecting", "connecting…");
    } else if (state === "lost") {
      this.context.setConnection("lost", "disconnected");
      const why = error?.message ?? "The stream broke off.";
      replace(this.problem, notice("warning", "What is shown may be out of date", `${why} Trying again in ${retry_s} s.`));
    } else if (error) {
      this.#failed(error);
    }
  }

  #failed(error) {
    this.context.onError(error);
    this.context.setConnection("lost", "disconnected");
    const unknown = error instanceof ApiError && error.status === 404;
    const later = unknown ? "" : ` Trying again in ${RETRY_MS / 1000} s.`;
    replace(
      this.problem,
      notice("error", unknown ? "There is no such job" : "The job could not be loaded", error.message + later, [
        el("a", { href: "#/jobs" }, "All jobs"),
      ]),
    );
    if (!this.charts) replace(this.body);
    if (!unknown && !this.#abort.signal.aborted) this.#retry = setTimeout(() => this.#load(), RETRY_MS);
  }

  #build() {
    const { loss, throughput, stepTime } = lineCharts();
    this.curves = [
      [loss, this.model.loss],
      [throughput, this.model.throughput],
      [stepTime, this.model.stepTime],
    ];
    this.charts = [loss, throughput, stepTime];
    this.head = new JobHead(this.model, (job) => this.#changed(job));
    this.memory = new MemoryChart();
    this.ranks = new RankTable();
    this.pauses = new PauseTable();
    this.events = new EventList();
    this.spec = new SpecCard(this.model.job);
    replace(
      this.body,
      this.head.element,
      el("section", { class: "curves", "aria-label": "Curves" }, loss.element, throughput.element, stepTime.element, markerLegend()),
      section("Memory of each rank", this.memory.element),
      section("Ranks at their newest step", this.ranks.element),
      section("Pauses", this.pauses.element),
      el("div", { class: "columns" }, section("Events", this.events.element), section("Specification", this.spec.element)),
    );
  }

  // A control has been answered with the job as it now is.
  #changed(job) {
    this.model.applyJob(job);
    this.#draw();
  }

  #drawNow() {
    const { model } = this;
    if (!this.charts || this.#abort.signal.aborted) return;
    this.context.setTitle(model.job.name);
    this.head.draw();
    for (const [chart, series] of this.curves) {
      chart.update({ points: series.points(chart.resolution), newest: series.newest, markers: model.markers });
    }
    this.memory.update(model.reports);
    this.ranks.update(model.reports);
    this.pauses.update(model.pauses);
    this.events.update(model.events, model.eventsDropped);
  }
}

function lineCharts() {
  return {
    loss: new LineChart({ title: "Loss", tone: "loss", format: (value) => decimal(value) }),
    throughput: new LineChart({
      title: "Throughput",
      unit: "tokens/s",
      tone: "throughput",
      format: (value) => compact(value),
      zero: true,
    }),
    stepTime: new LineChart({
      title: "Step time",
      tone: "time",
      format: (value) => duration(value),
      zero: true,
    }),
  };
}
