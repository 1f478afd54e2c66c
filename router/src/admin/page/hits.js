// Where cache hits were lost.

import { PartsOrText } from "./charts.js";
import { setText } from "./dom.js";
import { age, count, percent } from "./format.js";

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
