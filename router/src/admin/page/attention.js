// What an operator should look at, as `splitrail status` lists it.

import { el, Keyed, setAttribute, setText, shown } from "./dom.js";
import { address } from "./format.js";

// Workers that a line names.
const NAMED_MAX = 8;

// Workers that a line names with their addresses.
const ADDRESSES_MAX = 3;

/** Whom it is about, with a colon; empty if it is about the router. */
function about({ model, workers = [] }, models) {
  if (model === undefined) return "";
  if (workers.length === 0) return `Model ${shown(model)}: `;
  const of = models.find((one) => one.name === model)?.workers || [];
  const name = (id) => {
    const url = workers.length <= ADDRESSES_MAX && of.find((worker) => worker.id === id)?.url;
    return url ? `${shown(id)} (${shown(address(url))})` : shown(id);
  };
  const named = workers.slice(0, NAMED_MAX).map(name).join(", ");
  return workers.length > NAMED_MAX ? `${workers.length} workers (${named}, \u2026): ` : `${named}: `;
}

function make() {
  const what = el("span", { class: "attention-what" });
  const advice = el("span", { class: "attention-advice" });
  return { what, advice, node: el("li", {}, what, advice) };
}

export class AttentionList {
  constructor({ list, note }) {
    this.note = note;
    this.list = list;
    this.items = new Keyed(list, make);
  }

  show(found, models) {
    const wrong = found.filter((one) => !one.is_note).length;
    setText(this.note, wrong === 0 ? "All is well" : "");
    this.list.hidden = found.length === 0;
    this.items.update(found, (one) => JSON.stringify([one.kind, one.model, one.message]), (part, one) => {
      setAttribute(part.node, "data-note", one.is_note);
      setText(part.what, `${about(one, models)}${shown(one.message)}`);
      setText(part.advice, one.advice === undefined ? "" : shown(one.advice));
    });
  }
}
