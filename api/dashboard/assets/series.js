// One value over the steps of a job of any length, in bounded memory.
//
// Points are kept as buckets of `stride` steps each. When there are more than `capacity`, neighbours are
// merged and the stride doubles: the mean, the smallest and the largest value of every span stay exact.

const CAPACITY = 1024;

export class Series {
  #buckets = [];

  constructor({ capacity = CAPACITY } = {}) {
    this.capacity = capacity;
    this.stride = 1;
    this.newest = null; // the value of the newest step, alone
  }

  // Adds the value of a step. A step that comes again, because a recovery went back, replaces what was
  // known from there on; a span that began before it keeps its undone values beside the new ones.
  add(step, value) {
    if (!Number.isFinite(step) || !Number.isFinite(value)) return;
    this.#undoFrom(step);
    this.newest = value;
    const last = this.#buckets.at(-1);
    if (last && Math.floor(last.first / this.stride) === Math.floor(step / this.stride)) {
      last.last = step;
      last.sum += value;
      last.count += 1;
      last.min = Math.min(last.min, value);
      last.max = Math.max(last.max, value);
      return;
    }
    this.#buckets.push({ first: step, last: step, sum: value, count: 1, min: value, max: value });
    while (this.#buckets.length > this.capacity) this.#halve();
  }

  // The newest step; null before the first.
  get lastStep() {
    return this.#buckets.at(-1)?.last ?? null;
  }

  get length() {
    return this.#buckets.length;
  }

  // [{step, mean, min, max, count}], at most `limit`, oldest first; `step` is the last of its span.
  points(limit = this.capacity) {
    const group = Math.max(1, Math.ceil(this.#buckets.length / limit));
    const points = [];
    for (let start = 0; start < this.#buckets.length; start += group) {
      const merged = this.#buckets.slice(start, start + group).reduce(merge);
      points.push({
        step: merged.last,
        mean: merged.sum / merged.count,
        min: merged.min,
        max: merged.max,
        count: merged.count,
      });
    }
    return points;
  }

  #undoFrom(step) {
    while (this.#buckets.length && this.#buckets.at(-1).first >= step) this.#buckets.pop();
  }

  #halve() {
    this.stride *= 2;
    const merged = [];
    for (const bucket of this.#buckets) {
      const last = merged.at(-1);
      if (last && Math.floor(last.first / this.stride) === Math.floor(bucket.first / this.stride)) {
        merged[merged.length - 1] = merge(last, bucket);
      } else {
        merged.push(bucket);
      }
    }
    this.#buckets = merged;
  }
}

function merge(a, b) {
  return {
    first: a.first,
    last: b.last,
    sum: a.sum + b.sum,
    count: a.count + b.count,
    min: Math.min(a.min, b.min),
    max: Math.max(a.max, b.max),
  };
}
