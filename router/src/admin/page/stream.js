// Reads the router's server-sent events with fetch, which can send a key, and comes back after a
// break.

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 30_000;
// The least time without a byte after which a connection counts as lost.
const PATIENCE_MS = 10_000;
// No snapshot is as long.
const EVENT_MAX_CHARS = 32 << 20;

/** The headers that carry a key, if there is one. */
export function credential(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** Splits text that arrives in pieces into events. */
export class EventParser {
  constructor(onEvent) {
    this.onEvent = onEvent;
    this.text = "";
  }

  push(piece) {
    this.text += piece;
    let end = this.text.indexOf("\n\n");
    while (end >= 0) {
      this.event(this.text.slice(0, end));
      this.text = this.text.slice(end + 2);
      end = this.text.indexOf("\n\n");
    }
    if (this.text.length > EVENT_MAX_CHARS) throw new Error("an event is too long");
  }

  event(lines) {
    let name = "message";
    const data = [];
    for (const line of lines.split("\n")) {
      if (line.startsWith("event:")) name = line.slice(6).trim();
      else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
    }
    this.onEvent(name, data.join("\n"));
  }
}

/**
 * Follows a stream until it is stopped. Calls `onSnapshot(snapshot)` and
 * `onState(state, details)`, where the state is `connecting`, `live`, `lost`, `full`, `ended` or
 * `denied`.
 */
export class Stream {
  constructor({ path, onSnapshot, onState }) {
    this.path = path;
    this.onSnapshot = onSnapshot;
    this.onState = onState;
    this.key = "";
    this.failures = 0;
    this.retryTimer = 0;
    this.abort = null;
  }

  /** Connects now, with this key. */
  connect(key = this.key) {
    this.key = key;
    clearTimeout(this.retryTimer);
    this.abort?.abort();
    this.abort = new AbortController();
    this.run(this.abort).catch(() => {});
  }

  async run(abort) {
    if (this.failures === 0) this.onState("connecting", {});
    let patience = PATIENCE_MS;
    let watchdog = 0;
    const listen = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => abort.abort(), patience);
    };
    let reason = "lost";
    try {
      listen();
      const reply = await fetch(this.path, {
        headers: credential(this.key),
        signal: abort.signal,
        cache: "no-store",
        redirect: "error",
      });
      if (reply.status === 401 || reply.status === 403) {
        // A refused name is no matter of keys, so the router's own words are shown.
        const words = reply.status === 403 ? await reply.json().catch(() => null) : null;
        clearTimeout(watchdog);
        const message = words?.error?.message;
        this.onState("denied", { status: reply.status, hadKey: this.key !== "", message });
        return;
      }
      if (reply.status === 503) reason = "full";
      if (!reply.ok) throw new Error(`status ${reply.status}`);
      const parser = new EventParser((name, data) => {
        if (name === "end") reason = JSON.parse(data).reason === "credential" ? "denied" : "ended";
        if (name !== "snapshot") return;
        const snapshot = JSON.parse(data);
        patience = Math.max(PATIENCE_MS, 3 * (snapshot.next_in_ms || 0));
        this.failures = 0;
        this.onState("live", {});
        this.onSnapshot(snapshot);
      });
      const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        listen();
        parser.push(value);
      }
    } catch (error) {
      // A lost connection is told below, like the end of the stream.
      if (!(error instanceof Error)) throw error;
    } finally {
      clearTimeout(watchdog);
    }
    // Another connection has taken the place of this one.
    if (this.abort !== abort) return;
    abort.abort();
    if (reason === "denied") {
      this.onState("denied", { status: 401, hadKey: this.key !== "" });
      return;
    }
    this.retry(reason);
  }

  retry(reason) {
    const longest = Math.min(FIRST_WAIT_MS * 2 ** this.failures, LONGEST_WAIT_MS);
    // Pages that lost the same router do not all come back at the same time.
    const wait = longest * (0.5 + Math.random() / 2);
    this.failures = Math.min(this.failures + 1, 16);
    this.onState(reason, { retryAt: Date.now() + wait });
    this.retryTimer = setTimeout(() => this.connect(), wait);
  }
}
