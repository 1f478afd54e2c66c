// Figures as people read them.

/** What is shown for an unknown figure. */
export const NONE = "\u2013";

function digits(value, decimals) {
  return value.toLocaleString("en-US", {
    minimumFractionDigits: decimals,
    maximumFractionDigits: decimals,
  });
}

function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** A count, short: 950, 12.3 k, 4.6 M. */
export function count(value) {
  if (!known(value)) return NONE;
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e4]]) {
    if (value >= size) {
      const scaled = value / (size === 1e4 ? 1e3 : size);
      return `${digits(scaled, scaled < 100 ? 1 : 0)} ${unit}`;
    }
  }
  return digits(value, 0);
}

/** A rate: two significant digits below 10. */
export function rate(value) {
  if (!known(value)) return NONE;
  if (value === 0) return "0";
  if (value < 10) return digits(value, value < 1 ? 2 : 1);
  return count(value);
}

/** A factor: 1.0×, 12.3×. */
export function times(value) {
  return known(value) ? `${digits(value, 1)}\u00d7` : NONE;
}

/** A duration in milliseconds: 12.3 ms, 480 ms, 2.41 s. */
export function ms(value) {
  if (!known(value)) return NONE;
  if (value >= 1000) return `${digits(value / 1000, value < 10000 ? 2 : 1)} s`;
  return `${digits(value, value < 10 ? 1 : 0)} ms`;
}

/** A part from 0 to 1 as a percentage. */
export function percent(value) {
  if (!known(value)) return NONE;
  const share = value * 100;
  return `${digits(share, share > 0 && share < 10 ? 1 : 0)} %`;
}

/** A long duration in milliseconds: 42 s, 5 min, 3 h 12 min, 8 d. */
export function age(value) {
  if (!known(value)) return NONE;
  const seconds = Math.max(0, Math.floor(value / 1000));
  if (seconds < 60) return `${seconds} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d`;
}

const TIME = new Intl.DateTimeFormat("en-GB", {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
});

/** A time of day by this browser's clock: 12:03:04. */
export function time(unixMs) {
  return known(unixMs) ? TIME.format(unixMs) : NONE;
}

/** Words of an identifier: `parity_mismatch` is "parity mismatch". */
export function words(identifier) {
  return String(identifier ?? "").replaceAll("_", " ");
}

/** The address of an engine, without the usual scheme. */
export function address(url) {
  return String(url ?? "").replace(/^http:\/\//, "");
}

/** How fast a worker is, as far as that was learned: its prefill, and its decode step. */
export function speeds(worker) {
  const parts = [];
  if (worker.role !== "decode" && known(worker.prefill_tokens_per_s)) {
    parts.push(`${count(worker.prefill_tokens_per_s)} tok/s`);
  }
  if (worker.role !== "prefill" && known(worker.step_ms)) parts.push(`${ms(worker.step_ms)}/step`);
  return parts;
}
