// The pools side by side, and the flows of requests between their workers.

import { el, Keyed, setAttribute, setShare, setText, shown, svg } from "./dom.js";
import { address, count, ms, percent, rate, speeds, words } from "./format.js";

// Workers of a pool that are drawn; the table has all of them.
const DRAWN_MAX = 24;
// From this number on they are drawn in one line each.
const DENSE_FROM = 9;

/** What is wrong with a worker in a few words; empty if nothing is. */
export function trouble(worker) {
  if (worker.draining) return "draining";
  if (["down", "unready", "ejected", "stuck", "left"].includes(worker.state)) return worker.state;
  if (worker.breakers_open) return `breaker open: ${worker.breakers_open.join(", ")}`;
  if (worker.overlap_issues) return issue(worker);
  return ["joining", "warming"].includes(worker.state) ? worker.state : "";
}

/** Why the index of a worker is not trusted, in a few words. */
export function issue(worker) {
  const issues = (worker.overlap_issues || []).map((name) => {
    if (name === "parity_mismatch" && worker.parity_cause) return `parity: ${words(worker.parity_cause)}`;
    if (name === "overlap_discounted") return `discounted by ${percent(worker.overlap_discount_ratio)}`;
    return words(name);
  });
  return issues.join(", ");
}

/** How much a worker needs a look, from 0 on. */
export function urgency(worker) {
  if (["down", "unready", "ejected", "stuck"].includes(worker.state)) return 3;
  if (worker.breakers_open || worker.overlap_issues) return 2;
  return worker.draining ? 1 : 0;
}

class Pool {
  constructor(name) {
    this.title = el("h3");
    this.sum = el("p", { class: "note" });
    this.list = el("ul", { class: "nodes", role: "list" });
    this.more = el("p", { class: "node more", hidden: true });
    this.nobody = el("p", { class: "empty", hidden: true });
    this.node = el("div", { class: `pool ${name}` }, this.title, this.sum, this.list, this.more, this.nobody);
    this.nodes = new Keyed(this.list, makeNode);
  }

  show(title, workers, requestsPerS, nobody) {
    setText(this.title, title);
    const serving = workers.filter((worker) => worker.state === "serving").length;
    const parts = [`${serving} of ${workers.length} serving`];
    if (requestsPerS !== null) parts.push(`${rate(requestsPerS)} req/s`);
    setText(this.sum, workers.length === 0 ? "" : parts.join(" \u00b7 "));
    const drawn = pickDrawn(workers);
    setAttribute(this.list, "data-dense", drawn.length >= DENSE_FROM);
    this.nodes.update(drawn, (worker) => worker.id, showNode);
    this.more.hidden = workers.length <= DRAWN_MAX;
    setText(this.more, `and ${workers.length - drawn.length} more, in the table below`);
    this.nobody.hidden = workers.length > 0;
    setText(this.nobody, nobody);
  }

  /** The element of a worker; that of all others if the worker is not drawn. */
  place(id) {
    const part = this.nodes.parts.get(id);
    return part ? part.node : this.more.hidden ? null : this.more;
  }
}

/** The workers that are drawn, in their order: those in trouble, then the busiest. */
function pickDrawn(workers) {
  if (workers.length <= DRAWN_MAX) return workers;
  const ranked = [...workers].sort((a, b) => urgency(b) - urgency(a) || b.requests - a.requests);
  const chosen = new Set(ranked.slice(0, DRAWN_MAX));
  return workers.filter((worker) => chosen.has(worker));
}

function makeNode() {
  const part = {
    shape: el("i", { class: "shape", "aria-hidden": "true" }),
    id: el("span", { class: "node-id" }),
    requests: el("span", { class: "node-requests" }),
    used: el("span"),
    address: el("p", { class: "node-address" }),
    speed: el("p", { class: "node-speed" }),
    foot: el("p", { class: "node-foot" }),
  };
  const head = el("p", { class: "node-head" }, part.shape, part.id, part.requests);
  part.bar = el("div", { class: "bar", "aria-hidden": "true" }, part.used);
  part.node = el("li", { class: "node" }, head, part.address, part.bar, part.foot, part.speed);
  return part;
}

function showNode(part, worker) {
  const problem = trouble(worker);
  setAttribute(part.node, "data-state", worker.draining ? "draining" : worker.state);
  setAttribute(part.node, "data-doubt", Boolean(worker.overlap_issues));
  setText(part.id, shown(worker.id));
  const where = shown(address(worker.url));
  setAttribute(part.node, "title", `${shown(worker.id)} (${where}): ${worker.state}, ${shown(worker.state_why)}`);
  setText(part.address, where);
  setText(part.requests, `${count(worker.requests)} req`);
  setShare(part.used, worker.kv_used_ratio);
  setAttribute(part.bar, "data-full", (worker.kv_used_ratio || 0) > 0.9);
  const figures = [];
  if (worker.kv_used_ratio !== undefined) figures.push(`KV ${percent(worker.kv_used_ratio)}`);
  if (worker.hit_ratio !== undefined) figures.push(`hits ${percent(worker.hit_ratio)}`);
  if (worker.engine_waiting) figures.push(`${count(worker.engine_waiting)} waiting`);
  const speed = speeds(worker);
  if (worker.leg_ms !== undefined) speed.push(`leg ${ms(worker.leg_ms)}`);
  setText(part.speed, speed.join(" \u00b7 "));
  setText(part.foot, problem || figures.join(" \u00b7 ") || "no load report");
  setAttribute(part.foot, "class", problem ? "node-foot problem" : "node-foot");
}

function inWords(edge) {
  return `${edge.name.map(shown).join(" to ")}: ${rate(edge.perS)} requests/s`;
}

/** The cluster of one model. */
export class Cluster {
  constructor(host) {
    this.host = host;
    this.lines = svg("g");
    this.svg = svg("svg", { class: "flows", "aria-hidden": "true" }, this.lines);
    this.entry = el("p", { class: "entry", text: "Router" });
    this.from = new Pool("from");
    this.to = new Pool("to");
    // The drawing's lines in words.
    this.said = el("ul", { class: "quiet", "aria-label": "Flows" });
    this.host.append(this.svg, el("div", { class: "pool gate" }, this.entry), this.from.node, this.to.node, this.said);
    this.sayings = new Keyed(this.said, () => ({ node: el("li") }));
    this.edges = new Keyed(this.lines, () => {
      const title = svg("title");
      const path = svg("path", { class: "flow" }, title);
      return { node: path, title };
    });
    this.model = null;
    new ResizeObserver(() => this.drawFlows()).observe(host);
  }

  show(model) {
    this.model = model;
    const prefill = model.workers.filter((worker) => worker.role === "prefill");
    const answering = model.workers.filter((worker) => worker.role !== "prefill");
    const handsOver = model.flow !== "aggregated" || prefill.length > 0;
    setAttribute(this.host, "data-split", handsOver);
    this.from.node.hidden = !handsOver;
    const sum = (flows) => flows.reduce((total, flow) => total + flow.requests_per_s, 0);
    const handedOver = model.flows.filter((flow) => flow.prefill_worker !== undefined);
    this.from.show("Prefill", prefill, sum(handedOver), "No prefill worker.");
    const title = handsOver ? "Decode" : "Workers";
    this.to.show(title, answering, sum(model.flows), "No worker. Workers appear here when they join.");
    this.drawFlows();
  }

  /** The flows as lines between elements: from, to, requests per second, name. */
  listEdges() {
    const edges = new Map();
    const add = (from, to, perS, name, isLocal = false) => {
      if (!from || !to || from.offsetParent === null) return;
      const key = name.map((part) => JSON.stringify(part)).join();
      const edge = edges.get(key) || { key, from, to, perS: 0, name, isLocal };
      edge.perS += perS;
      edges.set(key, edge);
    };
    for (const { prefill_worker: prefill, decode_worker: decode, requests_per_s: perS } of this.model.flows) {
      const to = this.to.place(decode) || this.from.place(decode);
      if (prefill === undefined) {
        add(this.entry, to, perS, ["Router", decode], this.model.flow !== "aggregated");
        continue;
      }
      const from = this.from.place(prefill) || this.to.place(prefill);
      add(this.entry, from, perS, ["Router", prefill]);
      add(from, to, perS, [prefill, decode]);
    }
    return [...edges.values()];
  }

  drawFlows() {
    if (!this.model) return;
    const area = this.host.getBoundingClientRect();
    if (area.width === 0) return;
    setAttribute(this.svg, "viewBox", `0 0 ${area.width} ${area.height}`);
    const edges = this.listEdges();
    const most = Math.max(...edges.map((edge) => edge.perS), 1e-9);
    this.edges.update(edges, (edge) => edge.key, (part, edge) => {
      const [from, to] = [edge.from.getBoundingClientRect(), edge.to.getBoundingClientRect()];
      const [x1, x2] = [from.right - area.left, to.left - area.left];
      const [y1, y2] = [from, to].map((box) => box.top + Math.min(box.height, 64) / 2 - area.top);
      const bend = Math.max((x2 - x1) / 2, 8);
      const d = `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
      setAttribute(part.node, "d", d);
      setAttribute(part.node, "stroke-width", (1 + 5 * Math.sqrt(edge.perS / most)).toFixed(1));
      setAttribute(part.node, "data-local", edge.isLocal);
      setText(part.title, inWords(edge));
    });
    this.sayings.update(edges, (edge) => edge.key, (part, edge) => setText(part.node, inWords(edge)));
  }
}
