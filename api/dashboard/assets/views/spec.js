// What was asked for: the facts of a job's specification, and the whole of it as JSON.

import { el } from "../dom.js";
import { bytes, integer } from "../format.js";

export class SpecCard {
  constructor(job) {
    const { spec } = job;
    this.element = el(
      "div",
      {},
      el("dl", { class: "facts" }, facts(job).map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
      el(
        "details",
        { class: "chart-table" },
        el("summary", {}, "Everything, as JSON"),
        el("pre", { class: "scroll", tabindex: "0" }, JSON.stringify(spec, null, 2)),
      ),
    );
  }
}

function facts({ spec, id }) {
  const { model, data, zero, resources, optimizer, checkpoints } = spec;
  const batches = spec.global_batch / spec.micro_batch;
  return [
    ["Job", id],
    ["Model", modelText(model)],
    ["Data", data.kind === "text" ? data.paths.join(", ") : data.kind === "tokens" ? data.path : "synthetic"],
    ["ZeRO", `stage ${zero.stage}, ${spec.precision}`],
    ["Batch", `${integer(spec.global_batch)} samples of ${integer(spec.sequence_length)} tokens`],
    ["Micro-batches", `${integer(batches)}, each of ${integer(spec.micro_batch)} ${spec.micro_batch === 1 ? "sample" : "samples"}`],
    ["Optimizer", `${optimizer.kind}, lr ${optimizer.lr}, ${spec.schedule.kind}`],
    ["Per worker", resourceText(resources)],
    ["Checkpoints", checkpoints.every_steps ? `every ${integer(checkpoints.every_steps)} steps` : "on demand"],
    ["Seed", String(spec.seed)],
  ];
}

function modelText(model) {
  if (model.kind !== "gpt") return model.factory;
  return `GPT, ${model.layers} layers, hidden ${model.hidden}, ${model.heads} heads`;
}

function resourceText({ cpus, gpus, memory_bytes: memory }) {
  const parts = [`${cpus} ${cpus === 1 ? "CPU" : "CPUs"}`];
  if (gpus) parts.push(`${gpus} ${gpus === 1 ? "GPU" : "GPUs"}`);
  if (memory) parts.push(bytes(memory));
  return parts.join(", ");
}
