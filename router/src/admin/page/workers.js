// The table of all workers of a model.

import { issue, urgency } from "./cluster.js";
import { el, Keyed, setAttribute, setShare, setText, shown } from "./dom.js";
import { NONE, address, age, count, ms, percent, speeds, times } from "./format.js";

// Rows that are shown at first. Of more workers, those in trouble come first.
const ROWS = 24;

const COLUMNS = [
  ["Worker", "id"],
  ["State", "state"],
  ["Requests", "number", "Requests of this router that are in flight on the worker"],
  ["Prefill tokens", "number", "Prompt tokens that are booked on the worker and not computed yet"],
  ["Engine", "number", "Requests that the engine computes, and that wait in the engine"],
  ["KV used", "kv", "The used part of the engine's KV cache"],
  ["Hits", "number", "The part of its prompt tokens that the engine found in its cache, in the last minute"],
  ["Speed", "number", "Prompt tokens that it computes per second, and the time of a decode step, as learned"],
  ["Leg time", "number", "Mean time of its prefill legs, or of its other legs to the first event, in the last minute"],
  ["Slowdown", "number", "How many times as long as the usual worker of its role it takes"],
  ["Event lag", "number", "Mean time from a KV event in the engine to its presence in the index"],
  ["KV routing", "trust", "Whether the index of the worker is used, and why not"],
];

export class Workers {
  constructor(host) {
    const heads = COLUMNS.map(([label, name, hint]) => {
      return el("th", { scope: "col", role: "columnheader", class: name, title: hint, text: label });
    });
    this.body = el("tbody", { role: "rowgroup" });
    this.table = el(
      "table",
      { class: "workers", role: "table", "aria-labelledby": "workers-title" },
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...heads)),
      this.body,
    );
    this.nobody = el("p", { class: "empty", text: "No workers. They appear here when they join." });
    this.all = el("button", { type: "button", class: "plain", hidden: true });
    this.all.addEventListener("click", () => {
      this.showsAll = !this.showsAll;
      this.show(this.model, this.now);
    });
    this.showsAll = false;
    this.rows = new Keyed(this.body, makeRow);
    host.append(el("div", { class: "scroll" }, this.table), this.nobody, this.all);
  }

  show(model, now) {
    Object.assign(this, { model, now });
    const { workers } = model;
    const isLong = workers.length > ROWS;
    const ordered = isLong ? [...workers].sort((a, b) => urgency(b) - urgency(a)) : workers;
    const drawn = this.showsAll ? ordered : ordered.slice(0, ROWS);
    this.rows.update(drawn, (worker) => worker.id, (row, worker) => showRow(row, worker, now));
    this.table.hidden = workers.length === 0;
    this.nobody.hidden = workers.length > 0;
    this.all.hidden = !isLong;
    setText(this.all, this.showsAll ? `Show the first ${ROWS}` : `Show all ${workers.length}`);
  }
}

function cell(name, label, ...children) {
  return el("td", { role: "cell", class: name, "data-label": label }, ...children);
}

function makeRow() {
  const row = {
    id: el("span", { class: "name" }),
    role: el("span", { class: "role" }),
    address: el("span", { class: "address" }),
    shape: el("i", { class: "shape", "aria-hidden": "true" }),
    state: el("span", { class: "state-name" }),
    since: el("span", { class: "note" }),
    why: el("span", { class: "why" }),
    requests: el("span"),
    tokens: el("span"),
    engine: el("span"),
    used: el("span"),
    usedText: el("span"),
    hits: el("span"),
    speed: el("span"),
    leg: el("span"),
    slowdown: el("span"),
    lag: el("span"),
    trust: el("span", { class: "trust" }),
  };
  const [, , requests, tokens, engine, kv, hits, speed, leg, slowdown, lag, trust] = COLUMNS.map(([label]) => label);
  const bar = el("div", { class: "bar", "aria-hidden": "true" }, row.used);
  row.bar = bar;
  row.node = el(
    "tr",
    { role: "row" },
    el("th", { scope: "row", role: "rowheader", class: "id" }, row.id, row.role, row.address),
    cell("state", "State", row.shape, row.state, " ", row.since, row.why),
    cell("number", requests, row.requests),
    cell("number", tokens, row.tokens),
    cell("number", engine, row.engine),
    cell("kv", kv, el("div", { class: "used" }, bar, row.usedText)),
    cell("number", hits, row.hits),
    cell("number", speed, row.speed),
    cell("number", leg, row.leg),
    cell("number", slowdown, row.slowdown),
    cell("number", lag, row.lag),
    cell("trust", trust, row.trust),
  );
  return row;
}

function showRow(row, worker, now) {
  const state = worker.draining ? "draining" : worker.state;
  const breakers = worker.breakers_open ? `, breaker open: ${worker.breakers_open.join(", ")}` : "";
  setAttribute(row.node, "data-state", state);
  setText(row.id, shown(worker.id));
  setText(row.role, worker.transfer_group ? `${worker.role}, ${shown(worker.transfer_group)}` : worker.role);
  setText(row.address, shown(address(worker.url)));
  setText(row.state, state + breakers);
  setText(row.since, `for ${age(now - worker.state_since_unix_ms)}`);
  setText(row.why, state === "serving" ? "" : shown(worker.state_why));
  setText(row.requests, count(worker.requests));
  setText(row.tokens, count(worker.prefill_tokens));
  const engine = [worker.engine_running, worker.engine_waiting];
  setText(row.engine, `${count(engine[0])} + ${count(engine[1])}`);
  setShare(row.used, worker.kv_used_ratio);
  setAttribute(row.bar, "data-full", (worker.kv_used_ratio || 0) > 0.9);
  setText(row.usedText, percent(worker.kv_used_ratio));
  setText(row.hits, percent(worker.hit_ratio));
  setText(row.speed, speeds(worker).join(", ") || NONE);
  setText(row.leg, ms(worker.leg_ms));
  setText(row.slowdown, times(worker.slowdown));
  setText(row.lag, ms(worker.event_lag_ms));
  const isGone = ["down", "left"].includes(worker.state);
  setText(row.trust, isGone ? NONE : issue(worker) || (worker.overlap_counts ? "in use" : "not used"));
  setAttribute(row.node, "data-doubt", !isGone && Boolean(worker.overlap_issues));
}
