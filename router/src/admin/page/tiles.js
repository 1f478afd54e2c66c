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
    const failures = Object.entries(model.failures_per_s || {}).sort((a, b) => b[1] - a[1]);
    const sum = failures.reduce((total, [, perS]) => total + perS, 0);
    const named = failures.slice(0, 2).map(([outcome]) => words(outcome));
    if (failures.length > 2) named.push(`${failures.length - 2} more`);
    put("failures", rate(model.requests_per_s === undefined ? undefined : sum), named.join(", ") || "none");
    setAttribute(this.failures.tile, "data-bad", sum > 0);
  }
}
