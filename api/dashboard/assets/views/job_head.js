// The top of a job's page: name, state and reason, the figures that matter now, and the controls.

import { el, replace, setText } from "../dom.js";
import { age, compact, dateTime, decimal, duration, integer, percent, unixTime } from "../format.js";
import { FINISHED } from "../job_model.js";
import { JobControls } from "./controls.js";
import { figure, notice, progress, stateBadge } from "./parts.js";

export class JobHead {
  constructor(model, onChanged) {
    this.model = model;
    this.name = el("h1", {});
    this.badge = el("span", {});
    this.reason = el("p", { class: "reason" });
    this.controls = new JobControls(model, onChanged);
    this.figures = el("dl", { class: "figures" });
    this.error = el("div", {});
    this.element = el(
      "header",
      { class: "job-head" },
      el("div", { class: "job-title" }, this.name, this.badge, this.controls.element),
      this.reason,
      this.error,
      this.figures,
    );
  }

  draw() {
    const { job } = this.model;
    setText(this.name, job.name);
    if (this.badge.dataset.state !== job.state) {
      this.badge.dataset.state = job.state;
      replace(this.badge, stateBadge(job.state));
    }
    setText(this.reason, job.reason ?? "");
    this.reason.hidden = !job.reason;
    this.controls.draw();
    this.#drawError();
    replace(this.figures, this.#figures());
  }

  #figures() {
    const { job, tokensPerSecond } = this.model;
    const report = this.model.ranks.get(0);
    const { current, wanted, min, max } = job.workers;
    const asWanted = current === wanted || FINISHED.has(job.state);
    return [
      figure("Step", progress(job.step, job.steps)),
      figure("Loss", decimal(job.loss), report?.skipped_steps ? ` ${integer(report.skipped_steps)} steps skipped` : ""),
      figure("Throughput", compact(tokensPerSecond), " tokens/s"),
      figure("Step time", duration(report?.step_s)),
      figure("Workers", integer(current), asWanted ? ` of ${min} to ${max}` : ` / ${wanted} wanted`),
      figure("Generation", integer(job.generation)),
      figure("Goodput", percent(job.goodput), " of the time"),
      this.#time(job, report),
    ];
  }

  #time(job, report) {
    const created = unixTime(job.created_at);
    const finished = unixTime(job.finished_at);
    if (finished !== null) return figure("Took", duration(finished - created), el("span", { class: "below" }, `ended ${age(finished)}`));
    const left = (job.steps - job.step) * (report?.step_s ?? NaN);
    if (job.state === "running" && Number.isFinite(left)) return figure("Left", `≈ ${duration(left)}`);
    return figure("Submitted", el("time", { title: dateTime(created) }, age(created)));
  }

  #drawError() {
    const { error, job } = this.model;
    if (!error || job.state !== "failed") {
      if (this.error.firstChild) replace(this.error);
      return;
    }
    if (this.error.dataset.event === String(error.id)) return;
    this.error.dataset.event = String(error.id);
    const { rank, message, traceback } = error.data;
    replace(
      this.error,
      notice("error", rank === undefined || rank === null ? "The job failed" : `The job failed on rank ${rank}`, message, [
        traceback ? el("pre", { class: "traceback", tabindex: "0" }, traceback) : null,
      ]),
    );
  }
}
