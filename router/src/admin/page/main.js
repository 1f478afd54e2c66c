// The live page: reads the router's stream and shows the chosen model.

import { AttentionList } from "./attention.js";
import { Chart } from "./charts.js";
import { Cluster } from "./cluster.js";
import { Decisions, Why } from "./decisions.js";
import { el, setAttribute, setText, shown } from "./dom.js";
import { age, count, ms, rate, time } from "./format.js";
import { Hits } from "./hits.js";
import { Playground } from "./playground.js";
import { Ring } from "./ring.js";
import { Stages } from "./stages.js";
import { credential, Stream } from "./stream.js";
import { Tiles } from "./tiles.js";
import { Workers } from "./workers.js";

// Rows of the charts: ten minutes of snapshots and some.
const ROWS = 720;
const COLUMNS = [
  "ttft p50", "ttft p90", "ttft p99",
  "itl p50", "itl p90", "itl p99",
  "prefill cached", "prefill transferred", "prefill computed",
  "decode cached", "decode transferred", "decode computed",
];

const find = (id) => document.getElementById(id);

const ring = new Ring(ROWS, COLUMNS);
let snapshot = null;
let chosen = null;
let arrivedAt = 0;
let link = { state: "connecting", details: {} };
let isDrawing = false;

const percentiles = (from) => [
  { column: from, label: "p50", name: "p50" },
  { column: from + 1, label: "p90", name: "p90" },
  { column: from + 2, label: "p99", name: "p99" },
];
const sources = (from) => [
  { column: from, label: "Cached", name: "cached" },
  { column: from + 1, label: "Transferred", name: "transferred" },
  { column: from + 2, label: "Computed", name: "computed" },
];

const charts = {
  ttft: new Chart(find("chart-ttft"), {
    title: "Time to first token", series: percentiles(0), format: ms, empty: "No first token in the last ten minutes.",
  }),
  itl: new Chart(find("chart-itl"), {
    title: "Between tokens", series: percentiles(3), format: ms, empty: "No streams in the last ten minutes.",
  }),
  prefill: new Chart(find("chart-prefill"), {
    title: "Prefill legs", series: sources(6), stacked: true, format: rate, unit: "/s",
    empty: "No prefill leg in the last ten minutes.",
  }),
  decode: new Chart(find("chart-decode"), {
    title: "Legs that answer", series: sources(9), stacked: true, format: rate, unit: "/s",
    empty: "No prompt in the last ten minutes.",
  }),
};
const attention = new AttentionList({ list: find("attention"), note: find("attention-note") });
const tiles = new Tiles(find("tiles"));
const cluster = new Cluster(find("cluster"));
const workers = new Workers(find("workers"));
const hits = new Hits(find("hits"), find("hits-note"));
const stages = new Stages(find("stages"), find("stages-note"));
const stream = new Stream({ path: "/admin/live", onSnapshot, onState });
const why = new Why({ form: find("why-form"), input: find("why-id"), output: find("why"), getKey: () => stream.key });
const decisions = new Decisions(find("decisions"), (id) => {
  why.explain(id);
  find("why-title").scrollIntoView({ block: "start" });
});

new Playground({
  form: find("playground-form"), prompt: find("playground-prompt"), tenant: find("playground-tenant"),
  output: find("playground"), getKey: () => stream.key, getModel: () => chosen,
  onSent: (id) => why.explain(id),
});

/** A row of the charts from the members that snapshots and histories have in common. */
function row({ ttft_ms: ttft, inter_token_ms: itl, prompt_tokens_per_s: tokens }) {
  const leg = (of) => [of?.cached, of?.transferred, of?.computed];
  return [
    ttft?.p50, ttft?.p90, ttft?.p99,
    itl?.p50, itl?.p90, itl?.p99,
    ...leg(tokens?.prefill), ...leg(tokens?.decode),
  ];
}

/** Begins the charts of a model with what the router has recorded. */
async function loadHistory(name) {
  ring.clear();
  try {
    const reply = await fetch(`/admin/live/history?model=${encodeURIComponent(name)}`, {
      headers: credential(stream.key),
      cache: "no-store",
    });
    if (!reply.ok || name !== chosen) return;
    const history = await reply.json();
    const at = (columns, index) => {
      return Object.fromEntries(Object.entries(columns).map(([key, column]) => [key, column[index]]));
    };
    const recorded = history.time_unix_ms.map((unixMs, index) => [unixMs, row({
      ttft_ms: at(history.ttft_ms, index),
      inter_token_ms: at(history.inter_token_ms, index),
      prompt_tokens_per_s: {
        prefill: at(history.prompt_tokens_per_s.prefill, index),
        decode: at(history.prompt_tokens_per_s.decode, index),
      },
    })]);
    // Snapshots may have come meanwhile; they are newer.
    const later = [];
    for (let index = 0; index < ring.length; index += 1) {
      later.push([ring.time(index), COLUMNS.map((_, column) => ring.value(column, index))]);
    }
    ring.clear();
    for (const [unixMs, values] of [...recorded, ...later]) ring.push(unixMs, values);
    draw();
  } catch {
    // The charts begin with the next snapshot.
  }
}

function onSnapshot(next) {
  // A router of another version has another page. With a key, the page would ask for it again.
  if (snapshot && snapshot.router_version !== next.router_version && !stream.key) location.reload();
  const isAnother = !next.models.some((model) => model.name === chosen);
  snapshot = next;
  arrivedAt = Date.now();
  decisions.add(next.decisions);
  if (isAnother) choose(next.models[0]?.name ?? null);
  const model = next.models.find((one) => one.name === chosen);
  if (model) ring.push(next.time_unix_ms, row(model));
  draw();
}

function choose(name) {
  chosen = name;
  if (name !== null) loadHistory(name);
  draw();
}

function onState(state, details) {
  // After a break, the router may have recorded what this page missed.
  if (state === "live" && link.state !== "live" && chosen !== null) loadHistory(chosen);
  link = { state, details };
  if (state === "denied") {
    setText(find("key-problem"), details.message ?? (details.hadKey ? "The router does not accept this key (any more)." : ""));
    find("key").focus();
  }
  draw();
}

/** Draws soon: once per frame, and not while nobody sees it. */
function draw() {
  if (isDrawing || document.hidden) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    drawLink();
    drawBoard();
  });
}

function linkText() {
  const since = arrivedAt ? `No data since ${time(arrivedAt)}` : "Not connected";
  switch (link.state) {
    case "live": return "Live";
    case "denied": return "A key is needed";
    case "full": return "Too many viewers watch this router, retrying";
    case "ended": return `The router has stopped. ${since}, retrying`;
    case "lost": return `${since}, retrying`;
    default: return "Connecting";
  }
}

/** What changes every second; not part of the status, which a screen reader would read out. */
function linkTime() {
  if (link.state === "live") return time(arrivedAt);
  const seconds = Math.ceil(((link.details.retryAt || 0) - Date.now()) / 1000);
  return seconds > 0 ? `in ${seconds} s` : "";
}

function drawLink() {
  setAttribute(find("link"), "data-link", link.state);
  setText(find("link-text"), linkText());
  setText(find("link-time"), linkTime());
  setAttribute(document.body, "data-stale", snapshot !== null && link.state !== "live");
  const needsKey = link.state === "denied";
  find("key-form").hidden = !needsKey;
  find("waiting").hidden = snapshot !== null || needsKey;
  setText(find("waiting"), link.state === "connecting" ? "Waiting for the first snapshot." : `${linkText()}.`);
  if (needsKey && snapshot !== null) {
    snapshot = null;
    chosen = null;
    decisions.clear();
  }
}

function drawBoard() {
  find("board").hidden = snapshot === null;
  find("about").hidden = snapshot === null;
  find("ready").hidden = snapshot === null;
  if (snapshot === null) return;
  drawHead();
  const now = snapshot.time_unix_ms;
  const model = snapshot.models.find((one) => one.name === chosen);
  if (!model) return;
  tiles.show(model, snapshot.window_ms);
  cluster.show(model);
  workers.show(model, now);
  setText(find("workers-note"), `${count(model.workers.length)} of ${shown(model.name)}`);
  const hasLocal = model.flow !== "aggregated" && model.flows.some((flow) => flow.prefill_worker === undefined);
  const dashed = hasLocal ? ". Dashed: prefilled by the worker that answers" : "";
  setText(find("cluster-note"), `Flow ${model.flow}, policy ${model.policy}${dashed}`);
  charts.ttft.show(ring, now);
  charts.itl.show(ring, now);
  const handsOver = model.flow !== "aggregated";
  find("chart-prefill").hidden = !handsOver;
  if (handsOver) charts.prefill.show(ring, now);
  charts.decode.show(ring, now);
  hits.show(model.cache_loss);
  stages.show(model);
  decisions.show(snapshot.models.length > 1);
}

/** What is wrong with the router itself, or an empty text. */
function troubleOfRouter({ ready, draining, unplaced_failures_per_s: failures }) {
  if (draining && !ready) return "This router is draining: it finishes its requests and takes no new ones.";
  const parts = [];
  if (failures.shed) parts.push(`${count(failures.shed)} requests/s are refused because of load`);
  if (failures.failed) parts.push(`${count(failures.failed)} requests/s fail, as the log of this router says`);
  return parts.length === 0 ? "" : `Before their model is known, ${parts.join(", and ")}.`;
}

function drawHead() {
  setText(find("about-version"), snapshot.router_version);
  setText(find("about-uptime"), age(snapshot.uptime_ms));
  setText(find("about-config"), snapshot.config_hash);
  const state = snapshot.draining ? "draining" : snapshot.ready ? "ready" : "unready";
  const isStale = link.state !== "live";
  const said = { draining: "Draining", ready: "Ready", unready: "Not ready" }[state];
  setText(find("ready"), isStale ? `Last seen: ${said.toLowerCase()}` : said);
  setAttribute(find("ready"), "data-ready", isStale ? "unknown" : state);
  attention.show(snapshot.needs_attention, snapshot.models);
  const trouble = troubleOfRouter(snapshot);
  find("unready").hidden = trouble === "";
  setText(find("unready"), trouble);
  const names = snapshot.models.map((model) => model.name);
  const select = find("model");
  const listed = [...select.options].map((option) => option.value);
  if (JSON.stringify(listed) !== JSON.stringify(names)) {
    select.replaceChildren(...names.map((name) => el("option", { value: name, text: shown(name) })));
  }
  if (chosen !== null && select.value !== chosen) select.value = chosen;
  find("model-pick").hidden = names.length < 2;
  find("model-name").hidden = names.length !== 1;
  setText(find("model-name"), shown(names[0]));
  document.title = `${state === "ready" ? "" : "! "}${shown(chosen ?? "Splitrail")} \u00b7 Splitrail`;
}

find("model").addEventListener("change", (event) => choose(event.target.value));
find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = find("key").value.trim();
  find("key").value = "";
  stream.failures = 0;
  stream.connect(key);
});
document.addEventListener("visibilitychange", draw);
// The time until the next attempt, and how old the figures are, change without an event.
setInterval(() => {
  if (link.state !== "live") draw();
}, 1000);
stream.connect();
