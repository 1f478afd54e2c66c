// The last decisions, and why one request went where it did.

import { el, Keyed, setAttribute, setText, shown } from "./dom.js";
import { count, ms, percent, rate, time, words } from "./format.js";
import { credential } from "./stream.js";

// Decisions that are kept of those that snapshots show.
const KEPT = 16;
// Prompts of one request that are explained.
const PROMPTS_MAX = 16;

function key(decision) {
  const { decided_unix_ms: at, request_id: id, prompt_index: index, model } = decision;
  return JSON.stringify([at, id, index || 0, model]);
}

/** Workers on the way of a request. */
function way(decision) {
  const workers = [decision.prefill_worker, decision.decode_worker].filter(Boolean);
  return workers.map(shown).join(" \u2192 ") || "not placed yet";
}

export class Decisions {
  constructor(host, onPick) {
    this.host = host;
    this.kept = [];
    this.body = el("tbody", { role: "rowgroup" });
    const heads = ["Time", "Request", "Way", "Prompt tokens", "Overlap", "Next best", "Outcome"];
    this.table = el(
      "table",
      { class: "decisions", role: "table", "aria-labelledby": "decisions-title" },
      el(
        "thead",
        { role: "rowgroup" },
        el("tr", { role: "row" }, ...heads.map((text) => el("th", { scope: "col", role: "columnheader", text }))),
      ),
      this.body,
    );
    this.nothing = el("p", { class: "empty", text: "No decisions yet. They appear with the first request." });
    host.append(el("div", { class: "scroll" }, this.table), this.nothing);
    this.rows = new Keyed(this.body, () => {
      const row = { button: el("button", { type: "button", class: "id-button" }) };
      const names = ["time", "way", "prompt", "overlap", "next", "outcome"];
      const labels = heads.filter((head) => head !== "Request");
      const cells = names.map((name, index) => {
        row[name] = el("td", { role: "cell", class: name, "data-label": labels[index] });
        return row[name];
      });
      cells.splice(1, 0, el("td", { role: "cell", class: "request", "data-label": "Request" }, row.button));
      row.button.addEventListener("click", () => onPick(row.decision.request_id));
      row.node = el("tr", { role: "row" }, ...cells);
      return row;
    });
  }

  clear() {
    this.kept = [];
  }

  /** Adds the decisions of a snapshot. How others end that were running is not told. */
  add(decisions) {
    const ended = this.kept.filter((decision) => decision.outcome !== undefined);
    const byKey = new Map([...ended, ...decisions].map((decision) => [key(decision), decision]));
    const all = [...byKey.values()].sort((a, b) => b.decided_unix_ms - a.decided_unix_ms);
    this.kept = all.slice(0, KEPT);
  }

  /** Shows them. A row that is pointed at stays where it is. */
  show(showsModel) {
    if (this.body.matches(":hover, :focus-within")) return;
    this.table.hidden = this.kept.length === 0;
    this.nothing.hidden = this.kept.length > 0;
    this.rows.update(this.kept, key, (row, decision) => showDecision(row, decision, showsModel));
  }
}

function showDecision(row, decision, showsModel) {
  row.decision = decision;
  setText(row.time, time(decision.decided_unix_ms));
  setText(row.button, shown(decision.request_id));
  setText(row.way, showsModel ? `${way(decision)} (${shown(decision.model)})` : way(decision));
  setText(row.prompt, decision.prompt_tokens === undefined ? "unknown" : count(decision.prompt_tokens));
  const { overlap_blocks: held, best_overlap_blocks: best, prompt_blocks: all } = decision;
  setText(row.overlap, `${held} of ${all}${best > held ? `, best ${best}` : ""}`);
  const unit = decision.margin_unit ? ` ${decision.margin_unit}` : "";
  const margin =
    decision.margin === undefined ? "" : decision.margin === 0 ? ", equal" : ` by ${rate(decision.margin)}${unit}`;
  setText(row.next, decision.runner_up ? shown(decision.runner_up) + margin : "none");
  setText(row.outcome, words(decision.outcome || "running"));
  setAttribute(row.node, "data-outcome", decision.outcome || "running");
}

export class Why {
  constructor({ form, input, output, getKey }) {
    Object.assign(this, { form, input, output, getKey });
    this.asked = null;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.explain(input.value.trim());
    });
    this.say("Type the x-request-id of a reply, or choose a decision. Recent requests only.");
  }

  say(text) {
    this.output.replaceChildren(el("p", { class: "empty", text }));
  }

  async explain(id) {
    if (!id) return;
    this.input.value = id;
    this.asked?.abort();
    const asked = new AbortController();
    this.asked = asked;
    try {
      const reply = await fetch(`/admin/decisions?limit=${PROMPTS_MAX}&request_id=${encodeURIComponent(id)}`, {
        headers: credential(this.getKey()),
        signal: asked.signal,
        cache: "no-store",
      });
      const body = await reply.json();
      if (!reply.ok) throw new Error(body.error?.message || `status ${reply.status}`);
      this.show(id, body.decisions);
    } catch (error) {
      if (!asked.signal.aborted) this.say(`It could not be asked: ${shown(error.message)}`);
    }
  }

  show(id, decisions) {
    if (decisions.length === 0) {
      this.say(`No decision of ${shown(id)} is kept. The router keeps the last ones only (limits.decisions_kept).`);
      return;
    }
    const byPrompt = [...decisions].sort((a, b) => a.prompt_index - b.prompt_index);
    this.output.replaceChildren(...byPrompt.map((decision) => explained(decision, byPrompt.length > 1)));
  }
}

function fact(term, value) {
  return el("div", {}, el("dt", { text: term }), el("dd", { text: value }));
}

function explained(decision, isOneOfMany) {
  const facts = [
    fact("Flow", words(decision.flow)),
    fact("Way", way(decision)),
    fact("Prompt", decision.prompt_tokens === null ? words(decision.prompt_unknown) : `${count(decision.prompt_tokens)} tokens`),
    fact("Cached", decision.cached_tokens === null ? "not known yet" : `${count(decision.cached_tokens)} tokens (${decision.cached_source})`),
    fact("Attempts", String(decision.attempts)),
    fact("Outcome", words(decision.outcome || "running")),
  ];
  if (decision.total_ms !== undefined) {
    if (decision.ttft_ms !== null) facts.push(fact("First token after", ms(decision.ttft_ms)));
    facts.push(fact("Ended after", ms(decision.total_ms)));
    const stages = Object.entries(decision.stages_ms).map(([stage, took]) => `${words(stage)} ${ms(took)}`);
    facts.push(fact("Stages", stages.join(", ")));
  }
  if (decision.local_reason) facts.push(fact("Prefilled locally", words(decision.local_reason)));
  if (decision.gate) facts.push(fact("Gate", `${decision.gate}: ${words(decision.decode_try)}`));
  if (decision.cache_hit_ratio !== null && decision.cache_hit_threshold !== null) {
    facts.push(fact("Held, of needed", `${percent(decision.cache_hit_ratio)} of ${percent(decision.cache_hit_threshold)}`));
  }
  const legs = [...new Set(decision.candidates.map((candidate) => candidate.leg))];
  const vetoed = (decision.vetoed || []).map((veto) => {
    return el("li", { text: `${shown(veto.worker)}: ${words(veto.reason)} (${veto.leg})` });
  });
  return el(
    "article",
    { class: "explained" },
    el("h3", { text: `${shown(decision.request_id)}${isOneOfMany ? `, prompt ${decision.prompt_index}` : ""}` }),
    el("p", { class: "note", text: `${shown(decision.model)}, decided at ${time(decision.decided_unix_ms)}` }),
    el("dl", { class: "facts" }, ...facts),
    ...legs.map((leg) => candidates(decision, leg)),
    vetoed.length > 0 ? el("h4", { text: "Not considered" }) : null,
    vetoed.length > 0 ? el("ul", { class: "vetoed" }, ...vetoed) : null,
  );
}

function candidates(decision, leg) {
  const of = decision.candidates.filter((candidate) => candidate.leg === leg);
  const best = Math.min(...of.filter((candidate) => candidate.chosen).map((candidate) => candidate.cost));
  const head = ["Worker", "Overlap", "Requests", "Prefill tokens", "Cost", "Verdict"];
  const rows = of.map((candidate) => {
    const rank = candidate.rank === undefined ? "" : ` rank ${candidate.rank}`;
    const behind = candidate.cost - best;
    const verdict = candidate.chosen ? "chosen" : words(candidate.veto) || (behind > 0 ? `${rate(behind)} worse` : "");
    const cells = [
      `${candidate.overlap_blocks} of ${decision.prompt_blocks}`,
      count(candidate.requests),
      count(candidate.prefill_tokens),
      rate(candidate.cost),
      verdict,
    ];
    return el(
      "tr",
      { "data-chosen": candidate.chosen },
      el("th", { scope: "row", text: shown(candidate.worker) + rank }),
      ...cells.map((text) => el("td", { text })),
    );
  });
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      { class: "candidates" },
      el("caption", { text: `Candidates for the ${leg} leg` }),
      el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { scope: "col", text })))),
      el("tbody", {}, ...rows),
    ),
  );
}
