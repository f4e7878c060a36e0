// Arithmetic of axes: round ticks, and values to pixels. Pure.

// About `count` round values that lie within [low, high], in units of `base` (10, or 2 for bytes).
export function ticks(low, high, count, { base = 10 } = {}) {
  const step = roundStep((high - low) / Math.max(1, count), base);
  if (!(step > 0) || !Number.isFinite(step)) return [low];
  const values = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) {
    values.push(index * step);
  }
  return values;
}

function roundStep(raw, base) {
  if (!(raw > 0)) return 0;
  if (base === 2) return 2 ** Math.ceil(Math.log2(raw));
  const magnitude = 10 ** Math.floor(Math.log10(raw));
  const factor = [1, 2, 5, 10].find((candidate) => candidate * magnitude >= raw * 0.999);
  return factor * magnitude;
}

// A function from [low, high] to [from, to]; a span of nothing maps to the middle.
export function linear(low, high, from, to) {
  if (high === low) return () => (from + to) / 2;
  return (value) => from + ((value - low) / (high - low)) * (to - from);
}

// [low, high] of the values with some air, for an axis. `zero`: it begins at 0.
export function domain(low, high, { zero = false } = {}) {
  if (zero) return [0, high > 0 ? high * 1.08 : 1];
  if (low === high) return [low - Math.abs(low || 1) * 0.1, high + Math.abs(high || 1) * 0.1];
  const air = (high - low) * 0.06;
  return [low - air, high + air];
}
