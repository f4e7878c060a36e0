// Numbers, sizes and times as people read them. Pure; times are Unix seconds.

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const NONE = "–";

const known = (value) => typeof value === "number" && Number.isFinite(value);

// 4 significant digits: 2.3145 -> "2.315", 0.00012345 -> "1.235e-4".
export function decimal(value, digits = 4) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(digits - 1);
  const places = size === 0 ? 0 : Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return value.toFixed(Math.min(places, 6));
}

export function integer(value) {
  return known(value) ? Math.round(value).toLocaleString("en-US") : NONE;
}

export function bytes(value) {
  if (!known(value)) return NONE;
  let size = Math.abs(value);
  let unit = 0;
  while (size >= 1023.5 && unit < BYTE_UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
  return `${value < 0 ? "−" : ""}${size.toFixed(digits)} ${BYTE_UNITS[unit]}`;
}

// 12345 -> "12.3k".
export function compact(value) {
  if (!known(value)) return NONE;
  for (const [scale, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= scale * 0.9995) return `${trimmed(value / scale)}${suffix}`;
  }
  return trimmed(value);
}

function trimmed(value) {
  const size = Math.abs(value);
  return value.toFixed(size >= 99.95 || Number.isInteger(value) ? 0 : size >= 9.995 ? 1 : 2);
}

// 0.4237 -> "42.4%".
export function percent(value) {
  return known(value) ? `${(value * 100).toFixed(1)}%` : NONE;
}

export function rate(value) {
  return known(value) ? `${compact(value)} tokens/s` : NONE;
}

// A short span: 0.0123 -> "12.3 ms", 75 -> "1 min 15 s".
export function duration(seconds) {
  if (!known(seconds)) return NONE;
  if (seconds === 0) return "0 s";
  if (seconds < 1e-3) return `${trimmed(seconds * 1e6)} µs`;
  if (seconds < 0.9995) return `${trimmed(seconds * 1e3)} ms`;
  if (seconds < 59.95) return `${trimmed(seconds)} s`;
  const whole = Math.round(seconds);
  const parts = [
    [Math.floor(whole / 86400), "d"],
    [Math.floor(whole / 3600) % 24, "h"],
    [Math.floor(whole / 60) % 60, "min"],
    [whole % 60, "s"],
  ];
  const first = parts.findIndex(([count]) => count > 0);
  return parts
    .slice(first, first + 2)
    .filter(([count]) => count > 0)
    .map(([count, unit]) => `${count} ${unit}`)
    .join(" ");
}

export function age(time, now = Date.now() / 1000) {
  if (!known(time)) return NONE;
  const span = Math.max(0, now - time);
  if (span < 5) return "just now";
  if (span < 60) return `${Math.floor(span)} s ago`;
  if (span < 3600) return `${Math.floor(span / 60)} min ago`;
  if (span < 86400) return `${Math.floor(span / 3600)} h ago`;
  return `${Math.floor(span / 86400)} d ago`;
}

export function clock(time) {
  return known(time) ? new Date(time * 1000).toLocaleTimeString([], { hour12: false }) : NONE;
}

export function dateTime(time) {
  return known(time) ? new Date(time * 1000).toLocaleString([], { hour12: false }) : NONE;
}

// A formatted number less the zeros that end it: "2.50k" -> "2.5k". For the ticks of axes.
export function bare(text) {
  return text.replace(/(\.\d*?)0+(?!\d)/, "$1").replace(/\.(?!\d)/, "");
}

// snake_case names from the API as words.
export function words(name) {
  return String(name).replaceAll("_", " ");
}

// The API's times are Unix seconds or ISO 8601 texts; both become Unix seconds, anything else null.
export function unixTime(value) {
  if (known(value)) return value;
  const parsed = typeof value === "string" ? Date.parse(value) : NaN;
  return Number.isNaN(parsed) ? null : parsed / 1000;
}
