// The nodes of the cluster: what each has and what is free.

import { getCluster } from "../api.js";
import { el, replace } from "../dom.js";
import { bytes, dateTime, decimal } from "../format.js";
import { Poll } from "../poll.js";
import { loading, notice } from "./parts.js";

const INTERVAL_MS = 3_000;
const ID_SHOWN = 16;
const count = (value) => (Number.isInteger(value) ? String(value) : decimal(value, 3));
const RESOURCES = [
  { name: "CPUs", total: "cpus", free: "cpus_free", format: count },
  { name: "GPUs", total: "gpus", free: "gpus_free", format: count },
  { name: "Memory", total: "memory_bytes", free: "memory_free_bytes", format: bytes },
];

export class ClusterView {
  constructor(context) {
    this.context = context;
    context.setTitle("Cluster");
    this.problem = el("div", {});
    this.body = el("div", {}, loading("Asking the cluster…"));
    this.element = el("div", { class: "view" }, el("div", { class: "view-head" }, el("h1", {}, "Cluster")), this.problem, this.body);
    context.setConnection("connecting", "connecting…");
    this.poll = new Poll((signal) => this.#refresh(signal), {
      interval_ms: INTERVAL_MS,
      onFailure: (error, retry_s) => this.#failed(error, retry_s),
    });
  }

  destroy() {
    this.poll.stop();
  }

  async #refresh(signal) {
    const { nodes } = await getCluster({ signal });
    replace(this.problem);
    this.context.setConnection("live", "live");
    this.#draw(nodes);
  }

  #failed(error, retry_s) {
    this.context.onError(error);
    this.context.setConnection("lost", "disconnected");
    replace(this.problem, notice("error", "The cluster is not known at the moment", `${error.message} Trying again in ${retry_s} s.`));
    if (this.body.querySelector(".loading")) replace(this.body);
  }

  #draw(nodes) {
    if (!nodes.length) {
      replace(this.body, el("p", { class: "empty" }, "The cluster has no node."));
      return;
    }
    const alive = nodes.filter((node) => node.alive);
    const sum = (key) => alive.reduce((total, node) => total + node[key], 0);
    replace(
      this.body,
      el(
        "section",
        { class: "card" },
        el("h2", {}, `All nodes `, el("small", {}, `${alive.length} of ${nodes.length} alive`)),
        el("div", { class: "meters" }, RESOURCES.map((resource) => meter(resource, sum(resource.total), sum(resource.free)))),
        el("p", { class: "card-note" }, "Used is what jobs have reserved."),
      ),
      el("div", { class: "nodes" }, nodes.map(nodeCard)),
    );
  }
}

const stateOf = (node) => (!node.alive ? "dead" : node.draining ? "draining" : "alive");
const badgeOf = (node) => (!node.alive ? "state-failed" : node.draining ? "state-pausing" : "state-running");

function nodeCard(node) {
  return el(
    "section",
    { class: `card node${node.alive ? "" : " node-dead"}` },
    el(
      "h2",
      {},
      node.address,
      el("span", { class: `badge ${badgeOf(node)}` }, stateOf(node)),
    ),
    el("p", { class: "node-id", title: node.id }, node.id.slice(0, ID_SHOWN)),
    node.alive
      ? el("div", { class: "meters" }, RESOURCES.map((resource) => meter(resource, node[resource.total], node[resource.free])))
      : null,
    node.draining && node.deadline ? el("p", { class: "card-note" }, `It may be gone at ${dateTime(node.deadline)}.`) : null,
    node.jobs?.length
      ? el(
          "p",
          { class: "card-note" },
          node.jobs.map(({ job, workers, controller }) => [
            el("a", { href: `#/jobs/${encodeURIComponent(job)}` }, job),
            ` (${[...workers, ...(controller ? ["controller"] : [])].join(", ")}) `,
          ]),
        )
      : null,
  );
}

function meter({ name, format }, total, free) {
  const used = Math.max(0, total - free);
  const text = total > 0 ? `${format(used)} of ${format(total)} used` : "none";
  return el(
    "div",
    { class: "meter" },
    el("span", { class: "meter-name" }, name),
    el("progress", { max: total || 1, value: used, "aria-label": `${name}: ${text}` }),
    el("span", { class: "meter-text" }, text, total > 0 ? el("small", {}, `${format(free)} free`) : null),
  );
}
