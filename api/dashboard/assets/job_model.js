// What the page knows of one job: folds the job, its events and its reports, from the REST routes and from the
// stream, in any overlap, into curves, markers and each rank's newest report. Bounded; knows nothing of the page.

import { eventStep, markerOf } from "./job_events.js";
import { Series } from "./series.js";

const EVENTS_KEPT = 500;
const MARKERS_KEPT = 300;
const PAUSES_KEPT = 100;
const PAUSES = new Set(["resize", "recovery"]);

export const FINISHED = new Set(["succeeded", "failed", "cancelled"]);
export const ACTIVE = new Set(["starting", "running", "resizing", "recovering"]);

export class JobModel {
  #lastEventId = 0;
  #lastSeq = new Map();

  constructor() {
    this.job = null;
    this.events = [];
    this.eventsDropped = 0;
    this.markers = [];
    this.pauses = [];
    this.ranks = new Map();
    this.generation = -1;
    this.loss = new Series();
    this.throughput = new Series();
    this.stepTime = new Series();
    this.error = null;
  }

  // Id of the newest event known; 0 before the first.
  get lastEventId() {
    return this.#lastEventId;
  }

  // Every rank's newest report in the newest generation, by rank.
  get reports() {
    return [...this.ranks.values()].sort((a, b) => a.rank - b.rank);
  }

  // Tokens of one step over all ranks: the global batch is the same whatever the number of workers.
  get tokensPerStep() {
    return this.job.spec.global_batch * this.job.spec.sequence_length;
  }

  // Tokens per second at the newest step; null before the first.
  get tokensPerSecond() {
    const report = this.ranks.get(0);
    return report ? this.tokensPerStep / report.step_s : null;
  }

  applyJob(job) {
    if (this.job && job.version < this.job.version) return;
    this.job = job;
  }

  // Events come in the order of their ids from each source; what is known already is passed over.
  applyEvent(event) {
    if (event.id <= this.#lastEventId) return;
    this.#lastEventId = event.id;
    this.events.push(event);
    if (this.events.length > EVENTS_KEPT) {
      this.events.shift();
      this.eventsDropped += 1;
    }
    if (event.kind === "error") this.error = event;
    if (PAUSES.has(event.kind)) {
      this.pauses.push(event);
      if (this.pauses.length > PAUSES_KEPT) this.pauses.shift();
    }
    const marker = markerOf(event, eventStep(event) ?? this.loss.lastStep);
    if (marker) this.#addMarker(marker);
  }

  // The curves follow rank 0: the loss is the same on every rank, and all take their steps together.
  applyReport(report) {
    const known = this.#lastSeq.get(report.rank) ?? 0;
    if (report.seq <= known) return;
    this.#lastSeq.set(report.rank, report.seq);
    this.applyLatest(report);
    if (report.rank !== 0) return;
    this.loss.add(report.step, report.loss);
    this.stepTime.add(report.step, report.step_s);
    this.throughput.add(report.step, this.tokensPerStep / report.step_s);
    if (this.job.step < report.step) this.job = { ...this.job, step: report.step, loss: report.loss };
  }

  // A report that is only the newest of its rank, without the history before it.
  applyLatest(report) {
    if (report.generation < this.generation) return;
    if (report.generation > this.generation) {
      this.ranks.clear();
      this.generation = report.generation;
    }
    const shown = this.ranks.get(report.rank);
    if (!shown || shown.seq < report.seq) this.ranks.set(report.rank, report);
  }

  #addMarker(marker) {
    this.markers.push(marker);
    if (this.markers.length <= MARKERS_KEPT) return;
    const oldest = this.markers.findIndex(({ kind }) => kind === "checkpoint");
    this.markers.splice(Math.max(0, oldest), 1);
  }
}
