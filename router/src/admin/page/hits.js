// Where cache hits were lost, and what the shadow policy would have done.

import { Parts, PartsOrText } from "./charts.js";
import { el, setText } from "./dom.js";
import { age, count, percent, words } from "./format.js";

const LOSSES = [
  { key: "hit_blocks", label: "Found", name: "found", hint: "Blocks that the engines found in their caches" },
  { key: "cold_blocks", label: "Cold", name: "cold", hint: "No worker had computed them yet when the request came" },
  { key: "evicted_blocks", label: "Evicted", name: "evicted", hint: "No worker held them any more" },
  { key: "diverted_blocks", label: "Diverted", name: "diverted", hint: "Another worker was chosen, because of load or policy" },
  { key: "stale_blocks", label: "Stale", name: "stale", hint: "The worker did not hold what the index said" },
  { key: "parity_blocks", label: "Parity", name: "parity", hint: "The worker names blocks differently than the router" },
];

export class Hits {
  constructor(host, note) {
    this.note = note;
    this.parts = new PartsOrText(host, LOSSES);
  }

  show(loss) {
    if (loss === undefined || loss.best_blocks === 0) {
      setText(this.note, "");
      this.parts.showText(
        loss === undefined
          ? "Not tracked: the model has no tokenizer, or cache_loss_tracking: none."
          : "No prompt has repeated an earlier one lately: there was nothing to find.",
      );
      return;
    }
    const found = percent(loss.hit_blocks / loss.best_blocks);
    setText(this.note, `${found} of what the prompts of the last ${age(loss.window_ms)} allowed`);
    this.parts.show(loss, loss.best_blocks, (part, whole) => `${percent(part / whole)} \u00b7 ${count(part)}`);
  }
}

export class Shadow {
  constructor(host, note) {
    this.note = note;
    this.parts = new Parts(host, [
      { key: "same", label: "Same choice", name: "found", hint: "Choices in which both policies agree" },
      { key: "other", label: "Another worker", name: "evicted", hint: "Choices in which they differ" },
    ]);
    this.text = el("p", { class: "verdict" });
    host.append(this.text);
  }

  show(shadow) {
    setText(this.note, `${words(shadow.policy)}, since the router's start`);
    const choices = { same: shadow.same_choices, other: shadow.other_choices };
    const all = choices.same + choices.other;
    this.parts.show(choices, all, (part, whole) => {
      return whole > 0 ? `${percent(part / whole)} \u00b7 ${count(part)}` : "0";
    });
    const seconds = (value) => `${(value || 0).toFixed(value < 10 ? 2 : 0)} s`;
    setText(
      this.text,
      all === 0
        ? "It has not been asked yet."
        : `Where it chose differently, it was predicted to save ${seconds(shadow.saved_s)} of time to first token and to lose ${seconds(shadow.lost_s)}.`,
    );
  }
}
