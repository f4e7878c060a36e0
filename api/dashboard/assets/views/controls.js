// What a user may do to a job: each button asks for confirmation, then shows the service's answer.

import { actOnJob, resizeJob, saveCheckpoint } from "../api.js";
import { el } from "../dom.js";
import { ACTIVE } from "../job_model.js";
import { confirm } from "./dialog.js";

const RESIZABLE = new Set([...ACTIVE, "queued", "paused"]);

const ACTIONS = [
  {
    name: "resize",
    label: "Resize…",
    states: RESIZABLE,
  },
  {
    name: "checkpoint",
    label: "Save checkpoint",
    states: ACTIVE,
    title: "Save a checkpoint now?",
    text: "All ranks save their shards at the next step boundary; training goes on afterwards.",
    confirm: "Save checkpoint",
    run: async (job) => {
      await saveCheckpoint(job.id);
      return job;
    },
  },
  {
    name: "pause",
    label: "Pause",
    states: ACTIVE,
    title: "Pause this job?",
    text: "It saves a checkpoint and gives its workers back. Resume goes on from there.",
    confirm: "Pause job",
    run: (job) => actOnJob(job.id, "pause"),
  },
  {
    name: "resume",
    label: "Resume",
    states: new Set(["paused"]),
    title: "Resume this job?",
    text: "It queues for its workers and goes on from its last checkpoint.",
    confirm: "Resume job",
    run: (job) => actOnJob(job.id, "resume"),
  },
  {
    name: "cancel",
    label: "Cancel",
    states: new Set([...ACTIVE, "queued", "pausing", "paused"]),
    title: "Cancel this job?",
    text: "Its workers are stopped and it cannot be started again. Checkpoints saved so far are kept.",
    confirm: "Cancel job",
    dismiss: "Keep it",
    danger: true,
    run: (job) => actOnJob(job.id, "cancel"),
  },
];

export class JobControls {
  constructor(model, onChanged) {
    this.model = model;
    this.onChanged = onChanged;
    this.buttons = ACTIONS.map((action) => [
      action,
      el(
        "button",
        { type: "button", class: action.danger ? "danger" : "", "data-action": action.name, onclick: () => this.#ask(action) },
        action.label,
      ),
    ]);
    this.element = el(
      "div",
      { class: "controls", role: "group", "aria-label": "Controls of the job" },
      this.buttons.map(([, button]) => button),
    );
  }

  draw() {
    const { state } = this.model.job;
    for (const [action, button] of this.buttons) button.hidden = !action.states.has(state);
  }

  #ask(action) {
    if (action.name === "resize") this.#askResize();
    else confirm({ ...action, run: async () => this.onChanged(await action.run(this.model.job)) });
  }

  // The version that was shown goes with the request: if someone else was first, the service says so.
  #askResize() {
    const { id, workers, version } = this.model.job;
    const input = el("input", {
      type: "number",
      id: "wanted-workers",
      name: "workers",
      min: "1",
      step: "1",
      required: true,
      value: workers.wanted,
      inputmode: "numeric",
      "aria-describedby": "wanted-bounds",
    });
    confirm({
      title: "Resize this job",
      text: "The ranks stop at a step boundary, form a group of the new size and go on. No step is lost.",
      confirm: "Resize job",
      fields: el(
        "div",
        { class: "field" },
        el("label", { for: "wanted-workers" }, "Workers"),
        input,
        el("small", { id: "wanted-bounds" }, `${workers.wanted} wanted now; this job may have ${workers.min} to ${workers.max}.`),
      ),
      run: async () => this.onChanged(await resizeJob(id, input.valueAsNumber, { version })),
    });
  }
}
