// Sends a prompt through the front door, and shows the reply and the way of the request.

import { el, setText } from "./dom.js";
import { credential, EventParser } from "./stream.js";

const TOKENS_MAX = 64;

export class Playground {
  constructor({ form, prompt, tenant, output, getKey, getModel, onSent }) {
    Object.assign(this, { prompt, tenant, output, getKey, getModel, onSent });
    this.running = null;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
  }

  async send() {
    this.running?.abort();
    const running = new AbortController();
    this.running = running;
    const text = el("p", { class: "reply" });
    const note = el("p", { class: "note", text: "Sent" });
    this.output.replaceChildren(text, note);
    const began = performance.now();
    let first = null;
    try {
      const tenant = this.tenant.value.trim();
      const query = tenant === "" ? "" : `?tenant=${encodeURIComponent(tenant)}`;
      const reply = await fetch(`/admin/playground${query}`, {
        method: "POST",
        headers: { "content-type": "application/json", ...credential(this.getKey()) },
        body: JSON.stringify({
          model: this.getModel(),
          messages: [{ role: "user", content: this.prompt.value }],
          max_tokens: TOKENS_MAX,
          stream: true,
          stream_options: { include_usage: true },
        }),
        signal: running.signal,
      });
      if (!reply.ok) throw new Error((await reply.json()).error?.message ?? `status ${reply.status}`);
      let usage = null;
      const parser = new EventParser((name, data) => {
        if (data === "" || data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Error(event.error.message);
        usage = event.usage ?? usage;
        const delta = event.choices?.[0]?.delta;
        const piece = delta?.content ?? delta?.reasoning_content ?? "";
        if (piece === "") return;
        first ??= performance.now() - began;
        text.append(piece);
      });
      const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let read = await reader.read(); !read.done; read = await reader.read()) parser.push(read.value);
      setText(note, summary(usage, first, performance.now() - began));
      this.onSent(reply.headers.get("x-request-id"));
    } catch (error) {
      if (!running.signal.aborted) setText(note, `Not served: ${error.message}`);
    }
  }
}

function summary(usage, firstMs, totalMs) {
  const parts = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`${usage.prompt_tokens} prompt tokens, ${cached ?? "unknown"} of them cached`);
  }
  if (firstMs !== null) parts.push(`first token after ${Math.round(firstMs)} ms`);
  parts.push(`${Math.round(totalMs)} ms in all`);
  return parts.join("; ");
}
