// Where the time up to the first token goes.

import { PartsOrText } from "./charts.js";
import { setText } from "./dom.js";
import { ms } from "./format.js";

const ROUTER = ["tokenize", "match", "pick"];
const FAILED = ["decode_try", "failed"];

const STAGES = [
  { key: "queue", label: "Queue", name: "cold", hint: "Waiting in the router's queue for a worker" },
  { key: "router", label: "Router", name: "diverted", hint: "Template, tokens and block hashes, and the choice of workers" },
  { key: "attempts", label: "Attempts", name: "stale", hint: "Legs that failed, and decode workers that held too little" },
  { key: "peer_fetch", label: "Peer fetch", name: "parity", hint: "Taking a prefix from another worker" },
  { key: "prefill", label: "Prefill", name: "found", hint: "The prefill leg, including the queue of its engine" },
  { key: "first_token", label: "First token", name: "evicted", hint: "The leg that answers, up to its first event: the hand-off, and the first step of decoding" },
];

export class Stages {
  constructor(host, note) {
    this.note = note;
    this.parts = new PartsOrText(host, STAGES);
  }

  show({ stages_ms: stages, hand_off_ms: handOff }) {
    if (stages === undefined) {
      setText(this.note, "");
      this.parts.showText("No prompt was answered in the last minute.");
      return;
    }
    const handOffTime = handOff === undefined ? "" : `, hand-off ${ms(handOff)}`;
    setText(this.note, `Mean of the last minute${handOffTime}`);
    const sum = (keys) => keys.reduce((total, key) => total + (stages[key] || 0), 0);
    const parts = { ...stages, router: sum(ROUTER), attempts: sum(FAILED) };
    const whole = STAGES.reduce((total, { key }) => total + (parts[key] || 0), 0);
    this.parts.show(parts, whole, (part) => ms(part || 0));
  }
}
