// What a job's events mean to people: one line of text, a tone, and a marker on the curves. Pure.

import { bytes, duration, percent, words } from "./format.js";

const by = (data) => (data.who ? ` by ${data.who}` : "");
const workers = (count) => `${count} ${count === 1 ? "worker" : "workers"}`;
const phases = (seconds) =>
  Object.entries(seconds ?? {})
    .map(([name, value]) => `${words(name)} ${duration(value)}`)
    .join(", ");
const onRank = ({ rank }) => (rank === undefined || rank === null ? "" : `rank ${rank}`);
// What a change cost beside its time, as far as it was told.
const moved = (data) =>
  (data.steps_repeated ? `, ${data.steps_repeated} repeated` : "") +
  (data.bytes_moved === undefined ? "" : `, ${bytes(data.bytes_moved)} moved`) +
  (data.source ? `, state from ${words(data.source)}` : "");
const missing = (data) =>
  data.missing && Object.keys(data.missing).length
    ? ` (missing: ${Object.entries(data.missing)
        .map(([name, amount]) => `${amount} ${name}`)
        .join(", ")})`
    : "";
const reason = (data) => (data.reason ? `: ${data.reason}` : "");

const TEXTS = {
  phase: (data) => `${words(data.phase)}${reason(data)}`,
  state: (data) => `${words(data.from)} → ${words(data.to)}${reason(data)}`,
  request: (data) => `${words(data.action)} asked for${by(data)}${data.workers ? `: ${workers(data.workers)}` : ""}`,
  command: (data) =>
    `${words(data.kind)} ${data.refused ? "refused" : "taken"}${by(data)}${data.workers ? `: ${workers(data.workers)}` : ""}` +
    (data.refused ? `, ${data.refused}` : ""),
  resize: (data) =>
    `${data.old_workers} → ${workers(data.new_workers)} at step ${data.at_step}${by(data)}; ` +
    `paused ${duration(data.pause_s)}${data.seconds ? ` (${phases(data.seconds)})` : ""}, ` +
    `${data.steps_lost ?? 0} steps lost${moved(data)}${data.cause ? `: ${data.cause}` : ""}`,
  resize_refused: (data) =>
    `${workers(data.wanted)} refused, going on with ${data.workers}${reason(data)}${missing(data)}`,
  recovery: (data) =>
    `${data.old_workers} → ${workers(data.new_workers)} at step ${data.at_step}; ` +
    `paused ${duration(data.pause_s)}, ${data.steps_lost} steps lost${moved(data)}${data.cause ? `: ${data.cause}` : ""}`,
  worker_stuck: (data) =>
    data.rank === null || data.rank === undefined
      ? data.said
      : `${onRank(data)} (${data.worker}) at step ${data.step}: ${data.said}` +
        (data.dead ? "; it is treated as dead" : ""),
  worker_slow: (data) =>
    `${onRank(data)} (${data.worker}) ` +
    (data.over
      ? "keeps up again"
      : `is slow: the others lose ${percent(data.share)} of the step to it, ${duration(data.seconds)}`),
  drain: (data) =>
    `node ${String(data.node).slice(0, 12)}${data.workers?.length ? ` with ${data.workers.join(", ")}` : ""}: ${data.said}`,
  worker_lost: (data) =>
    `${onRank(data) || "a worker"}${data.worker ? ` (${data.worker})` : ""} at step ${data.step}${data.cause ? `: ${data.cause}` : ""}`,
  checkpoint: (data) =>
    `step ${data.step}, ${bytes(data.bytes)} in ${duration(data.seconds)}${data.reason ? ` (${data.reason})` : ""}` +
    (data.stall_s === undefined ? "" : `, training held up ${duration(data.stall_s)}`),
  checkpoint_failed: (data) => `step ${data.step} (${data.reason}): ${data.error}`,
  checkpoint_dropped: (data) => `${data.dropped_step === null ? "one" : `step ${data.dropped_step}`}${reason(data)}`,
  checkpoint_damaged: (data) =>
    `${data.checkpoint} is passed over${reason(data)}; going on from step ${data.loaded_step}`,
  data_restarted: (data) => data.reason,
  error: (data) => [onRank(data), data.message].filter(Boolean).join(": "),
};

const TONES = {
  resize: "accent",
  resize_refused: "warning",
  recovery: "warning",
  worker_lost: "danger",
  worker_slow: "warning",
  drain: "warning",
  checkpoint_failed: "danger",
  checkpoint_dropped: "warning",
  checkpoint_damaged: "danger",
  data_restarted: "warning",
  error: "danger",
};

// One line about the event, less its kind.
export function eventText(event) {
  const text = TEXTS[event.kind];
  return text ? text(event.data) : JSON.stringify(event.data);
}

// "neutral", "accent", "warning", "danger" or "good".
export function eventTone(event) {
  const state = event.kind === "phase" ? event.data.phase : event.kind === "state" ? event.data.to : null;
  if (state === "failed") return "danger";
  if (state === "recovering") return "warning";
  if (state === "succeeded") return "good";
  if (event.kind === "worker_stuck") return event.data.dead ? "danger" : "warning";
  if (event.kind === "worker_slow" && event.data.over) return "good";
  return TONES[event.kind] ?? "neutral";
}

// The step an event belongs to, where it says so.
export function eventStep(event) {
  return event.data.at_step ?? event.data.step ?? event.step ?? null;
}

// What is drawn on the curves: {kind, step, label, text}, or null.
export function markerOf(event, step) {
  if (step === null || step === undefined) return null;
  const { data, kind } = event;
  if (kind === "resize") {
    return { kind, step, label: `${data.old_workers}→${data.new_workers}`, text: `Resize ${eventText(event)}` };
  }
  if (kind === "recovery") {
    return { kind, step, label: `↺ ${data.old_workers}→${data.new_workers}`, text: `Recovery ${eventText(event)}` };
  }
  if (kind === "checkpoint") return { kind, step, label: "", text: `Checkpoint at ${eventText(event)}` };
  return null;
}
