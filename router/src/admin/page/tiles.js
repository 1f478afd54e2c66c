// The figures at the top.

import { el, setAttribute, setText } from "./dom.js";
import { count, ms, percent, rate, words } from "./format.js";

const TILES = [
  ["requests", "Requests/s"],
  ["flight", "In flight"],
  ["ttft", "Time to first token"],
  ["itl", "Between tokens"],
  ["hits", "Cache hits"],
  ["generated", "Tokens/s"],
  ["failures", "Failures/s"],
];

export class Tiles {
  constructor(host) {
    for (const [key, label] of TILES) {
      const value = el("dd", { class: "value" });
      const more = el("dd", { class: "more" });
      const tile = el("div", { class: "tile" }, el("dt", { text: label }), value, more);
      this[key] = { value, more, tile };
      host.append(tile);
    }
  }

  show(model, windowMs) {
    const put = (key, value, more) => {
      setText(this[key].value, value);
      setText(this[key].more, more);
    };
    const minute = `last ${Math.round(windowMs / 1000)} s`;
    put("requests", rate(model.requests_per_s), "that ended");
    const queued = model.queue_requests;
    put("flight", count(model.requests_in_flight), queued === undefined ? "no queue" : `${count(queued)} in the queue`);
    put("ttft", ms(model.ttft_ms?.p50), model.ttft_ms ? `p99 ${ms(model.ttft_ms.p99)}` : `no streams in the ${minute}`);
    put("itl", ms(model.inter_token_ms?.p50), model.inter_token_ms ? `p99 ${ms(model.inter_token_ms.p99)}` : `no streams in the ${minute}`);
    put("hits", percent(model.hit_ratio), "of prompt tokens");
    put("generated", rate(model.generation_tokens_per_s), "generated");
    const { failed, others } = sums(model.results_per_s || {});
    put("failures", rate(model.requests_per_s === undefined ? undefined : failed), failed > 0 ? faults(model) : other(others));
    setAttribute(this.failures.tile, "data-bad", failed > 0);
  }
}

/** The rates of requests that failed or were shed, and of others that did not end well. */
function sums(results) {
  let [failed, others] = [0, 0];
  for (const [result, perS] of Object.entries(results)) {
    if (result === "failed" || result === "shed") failed += perS;
    else if (result !== "ok") others += perS;
  }
  return { failed, others };
}

/** What went wrong: outcomes, the most frequent first, or kinds of outcomes if some were the fault of clients. */
function faults(model) {
  const results = Object.keys(model.results_per_s);
  if (results.includes("invalid") || results.includes("limited")) {
    return ["failed", "shed"].filter((result) => results.includes(result)).join(", ");
  }
  const found = Object.entries(model.failures_per_s || {}).filter(([outcome]) => outcome !== "cancelled");
  const named = found.sort((a, b) => b[1] - a[1]).slice(0, 2).map(([outcome]) => words(outcome));
  if (found.length > 2) named.push(`${found.length - 2} more`);
  return named.join(", ");
}

/** What is said of clients that left, and of requests that were at fault or over a limit. */
function other(perS) {
  return perS > 0 ? `${rate(perS)} cancelled or refused` : "none";
}
