// Asks again and again while the page is visible, slower after failures; never two requests at a time.

const SLOWEST_MS = 30_000;

// `ask(signal)` is awaited, then `interval_ms` pass. `onFailure(error, retry_s)` hears of what it throws.
export class Poll {
  #timer = null;
  #controller = new AbortController();
  #busy = false;
  #again = false;
  #failures = 0;

  constructor(ask, { interval_ms, onFailure }) {
    this.ask = ask;
    this.interval_ms = interval_ms;
    this.onFailure = onFailure;
    document.addEventListener("visibilitychange", this.#onVisibility);
    this.now();
  }

  // Ask at once; a request that is under way is followed by another.
  async now() {
    if (this.#busy) {
      this.#again = true;
      return;
    }
    clearTimeout(this.#timer);
    this.#busy = true;
    let wait_ms = this.interval_ms;
    try {
      await this.ask(this.#controller.signal);
      this.#failures = 0;
    } catch (error) {
      if (this.#controller.signal.aborted) return;
      this.#failures += 1;
      wait_ms = Math.min(this.interval_ms * 2 ** this.#failures, SLOWEST_MS);
      this.onFailure(error, wait_ms / 1000);
    } finally {
      this.#busy = false;
    }
    if (this.#controller.signal.aborted) return;
    if (this.#again) wait_ms = 0;
    this.#again = false;
    if (!document.hidden) this.#timer = setTimeout(() => this.now(), wait_ms);
  }

  stop() {
    document.removeEventListener("visibilitychange", this.#onVisibility);
    clearTimeout(this.#timer);
    this.#controller.abort();
  }

  #onVisibility = () => {
    if (document.hidden) clearTimeout(this.#timer);
    else this.now();
  };
}
