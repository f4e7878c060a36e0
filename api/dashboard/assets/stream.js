// One job's server-sent events: connects, connects again after a loss from where it stood, and tells in which
// state it is. Knows EventSource and the names of the events; nothing of what they mean.

import { ApiError, getJob, streamPath } from "./api.js";

const FIRST_WAIT_MS = 1_000;
const LONGEST_WAIT_MS = 15_000;

// States given to `onState(state, {error, retry_s})`: "connecting", "live", "lost" (trying again), "ended".
export class JobStream {
  #source = null;
  #retry = null;
  #wait_ms = FIRST_WAIT_MS;
  #lastId;
  #running = false;

  constructor(jobId, { after, onEntry, onState }) {
    this.jobId = jobId;
    this.#lastId = after;
    this.onEntry = onEntry;
    this.onState = onState;
  }

  // Id of the last timeline entry received: where the next connection goes on.
  get lastId() {
    return this.#lastId;
  }

  open() {
    if (this.#running) return;
    this.#running = true;
    document.addEventListener("visibilitychange", this.#onVisibility);
    this.#connect();
  }

  close() {
    if (!this.#running) return;
    this.#running = false;
    document.removeEventListener("visibilitychange", this.#onVisibility);
    this.#disconnect();
    this.onState("ended", {});
  }

  #connect() {
    this.#disconnect();
    this.onState("connecting", {});
    const source = new EventSource(streamPath(this.jobId, this.#lastId));
    this.#source = source;
    source.onopen = () => {
      this.#wait_ms = FIRST_WAIT_MS;
      this.onState("live", {});
    };
    source.onerror = () => this.#lost(source);
    for (const name of ["job", "event", "report"]) {
      source.addEventListener(name, (message) => this.#received(source, name, message));
    }
  }

  #received(source, name, message) {
    if (source !== this.#source) return;
    const id = Number(message.lastEventId);
    if (id > this.#lastId) this.#lastId = id;
    this.onEntry(name, JSON.parse(message.data), id);
  }

  // The browser reconnects by itself only after some failures, and then forever at one pace: this does it for
  // all of them, with growing waits, and finds out first why the connection failed.
  #lost(source) {
    if (source !== this.#source) return;
    this.#disconnect();
    this.#retryLater(null);
  }

  async #reconnect() {
    this.#retry = null;
    const error = await getJob(this.jobId).then(
      () => null,
      (reason) => reason,
    );
    if (!this.#running || this.#source || this.#retry || document.hidden) return;
    const fatal = error instanceof ApiError && [401, 403, 404].includes(error.status);
    if (fatal) {
      this.close();
      this.onState("ended", { error });
    } else if (error) {
      this.#retryLater(error);
    } else {
      this.#connect();
    }
  }

  #retryLater(error) {
    const wait_ms = this.#wait_ms;
    this.#wait_ms = Math.min(2 * wait_ms, LONGEST_WAIT_MS);
    this.onState("lost", { error, retry_s: wait_ms / 1000 });
    this.#retry = setTimeout(() => this.#reconnect(), wait_ms);
  }

  #disconnect() {
    clearTimeout(this.#retry);
    this.#retry = null;
    this.#source?.close();
    this.#source = null;
  }

  // A hidden page holds no connection (browsers allow six to a host), and catches up when it is seen again.
  #onVisibility = () => {
    if (document.hidden) this.#disconnect();
    else if (!this.#source) this.#connect();
  };
}
