// Small charts over the last ten minutes. Their elements are made once and changed afterwards.

import { el, setAttribute, setText, svg } from "./dom.js";
import { age, time } from "./format.js";

// The longest and the shortest time that a chart shows.
const SPAN_MS = 600_000;
const SPAN_MIN_MS = 60_000;

/** A round number that is not smaller. */
function ceiling(value) {
  if (!(value > 0)) return 1;
  const size = 10 ** Math.floor(Math.log10(value));
  const steps = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10];
  return size * steps.find((step) => step * size >= value * 0.999);
}

/**
 * A chart of some columns of a ring: lines, or areas that stand on each other.
 *
 * `series` has `{ column, label, name }`, the last one on top; `name` is the class that gives the
 * colour.
 */
export class Chart {
  constructor(host, { title, series, stacked = false, format, empty, unit = "" }) {
    Object.assign(this, { host, title, series, stacked, format, empty, unit });
    this.pointed = null;
    this.ring = null;
    this.build();
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  build() {
    this.caption = el("figcaption", { text: this.title });
    this.legend = el("dl", { class: "legend" });
    this.readings = this.series.map(({ label, name }) => {
      const value = el("dd");
      this.legend.prepend(
        el("div", {}, el("dt", {}, el("i", { class: `key ${name}`, "aria-hidden": "true" }), label), value),
      );
      return value;
    });
    if (!this.stacked) this.legend.append(...[...this.legend.children].reverse());
    this.when = el("span", { class: "when" });
    this.plot = el("div", {
      class: "plot",
      tabindex: 0,
      role: "group",
      "aria-label": `${this.title}: the arrow keys read past moments`,
    });
    this.grid = svg("path", { class: "grid" });
    this.top = svg("text", { class: "tick", "text-anchor": "start" });
    this.middle = svg("text", { class: "tick", "text-anchor": "start" });
    this.left = svg("text", { class: "tick", "text-anchor": "start" });
    this.right = svg("text", { class: "tick", "text-anchor": "end" });
    this.right.textContent = "now";
    this.cursor = svg("path", { class: "cursor" });
    this.shapes = this.series.map(({ name }) => {
      return svg("path", { class: `${this.stacked ? "area" : "line"} ${name}` });
    });
    this.svg = svg(
      "svg",
      { role: "img", "aria-label": this.title },
      this.grid,
      ...this.shapes,
      this.cursor,
      this.top,
      this.middle,
      this.left,
      this.right,
    );
    this.nothing = el("p", { class: "empty", text: this.empty });
    this.plot.append(this.svg, this.nothing);
    this.plot.addEventListener("pointermove", (event) => {
      this.pointed = event.clientX - this.plot.getBoundingClientRect().left;
      this.draw();
    });
    this.plot.addEventListener("pointerleave", () => {
      this.pointed = null;
      this.draw();
    });
    this.plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const width = this.plot.clientWidth;
      this.pointed = Math.min(Math.max((this.pointed ?? width) + (step * width) / 60, 0), width);
      this.draw();
    });
    this.plot.addEventListener("blur", () => {
      this.pointed = null;
      this.draw();
    });
    this.host.append(el("div", { class: "chart-head" }, this.caption, this.when), this.legend, this.plot);
  }

  /** Shows the rows of a ring up to a time. */
  show(ring, now) {
    this.ring = ring;
    this.now = now;
    this.draw();
  }

  /** The figure of a series in a row: its own, or with those below if they are stacked. */
  height(series, row) {
    if (!this.stacked) return this.ring.value(this.series[series].column, row);
    let sum = 0;
    for (let below = 0; below <= series; below += 1) {
      sum += this.ring.value(this.series[below].column, row);
    }
    return sum;
  }

  draw() {
    const width = this.plot.clientWidth;
    const height = this.plot.clientHeight;
    if (!this.ring || width === 0 || height === 0) return;
    const first = this.ring.since(this.now - SPAN_MS);
    let max = 0;
    let some = false;
    let begun = this.now;
    for (let row = first; row < this.ring.length; row += 1) {
      for (let series = 0; series < this.series.length; series += 1) {
        const value = this.height(series, row);
        if (!Number.isNaN(value)) {
          some = some || !this.stacked || value > 0;
          max = Math.max(max, value);
          begun = Math.min(begun, this.ring.time(row));
        }
      }
    }
    // What has just begun is not squeezed into the right margin.
    const span = Math.min(Math.max(this.now - begun, SPAN_MIN_MS), SPAN_MS);
    this.nothing.hidden = some;
    this.svg.toggleAttribute("hidden", !some);
    if (!some) {
      this.readings.forEach((reading) => setText(reading, "\u2013"));
      setText(this.when, "");
      return;
    }
    this.drawPlot({ width, height, first, span, max: ceiling(max) });
  }

  drawPlot({ width, height, first, span, max }) {
    const text = parseFloat(getComputedStyle(this.plot).fontSize);
    const [above, below] = [text * 0.5, text * 1.5];
    const x = (at) => ((at - (this.now - span)) / span) * width;
    setText(this.left, `${age(Math.round(span / 60_000) * 60_000)} ago`);
    const y = (value) => above + (height - above - below) * (1 - value / max);
    setAttribute(this.svg, "viewBox", `0 0 ${width} ${height}`);
    setAttribute(this.svg, "width", width);
    setAttribute(this.svg, "height", height);
    const lines = [0, max / 2, max].map((value) => `M0 ${y(value).toFixed(1)}H${width}`);
    setAttribute(this.grid, "d", lines.join(""));
    for (const [tick, value] of [[this.top, max], [this.middle, max / 2]]) {
      setText(tick, this.format(value) + this.unit);
      setAttribute(tick, "x", 2);
      setAttribute(tick, "y", (y(value) + text * 0.95).toFixed(1));
    }
    for (const [tick, at] of [[this.left, 2], [this.right, width - 2]]) {
      setAttribute(tick, "x", at);
      setAttribute(tick, "y", height - text * 0.3);
    }
    this.shapes.forEach((shape, series) => {
      setAttribute(shape, "d", this.stacked ? this.area(series, first, x, y) : this.line(series, first, x, y));
    });
    this.drawReadings(first, x, above, height - below);
  }

  line(series, first, x, y) {
    const parts = [];
    let open = false;
    for (let row = first; row < this.ring.length; row += 1) {
      const value = this.height(series, row);
      if (Number.isNaN(value)) {
        open = false;
        continue;
      }
      parts.push(`${open ? "L" : "M"}${x(this.ring.time(row)).toFixed(1)} ${y(value).toFixed(1)}`);
      open = true;
    }
    return parts.join("");
  }

  area(series, first, x, y) {
    const [upper, lower] = [[], []];
    for (let row = first; row < this.ring.length; row += 1) {
      const value = this.height(series, row) || 0;
      const base = series === 0 ? 0 : this.height(series - 1, row) || 0;
      const at = x(this.ring.time(row)).toFixed(1);
      upper.push(`${at} ${y(value).toFixed(1)}`);
      lower.push(`${at} ${y(base).toFixed(1)}`);
    }
    return upper.length === 0 ? "" : `M${upper.join("L")}L${lower.reverse().join("L")}Z`;
  }

  /** The figures of the row under the pointer, or of the last one. */
  drawReadings(first, x, top, bottom) {
    let row = this.ring.length - 1;
    if (this.pointed !== null) {
      const away = (index) => Math.abs(x(this.ring.time(index)) - this.pointed);
      for (let index = first; index < this.ring.length; index += 1) {
        if (away(index) < away(row)) row = index;
      }
    }
    this.readings.forEach((reading, series) => {
      setText(reading, this.format(this.ring.value(this.series[series].column, row)) + this.unit);
    });
    const at = x(this.ring.time(row)).toFixed(1);
    setAttribute(this.cursor, "d", this.pointed === null ? "" : `M${at} ${top}V${bottom}`);
    setText(this.when, this.pointed === null ? "" : `at ${time(this.ring.time(row))}`);
  }
}

/** One bar that is divided into parts, with a list of them. */
export class Parts {
  constructor(host, parts) {
    this.items = parts.map(({ key, label, name, hint }) => {
      const piece = el("span", { class: name });
      const value = el("dd");
      const row = el(
        "div",
        {},
        el("dt", { title: hint }, el("i", { class: `key ${name}`, "aria-hidden": "true" }), label),
        value,
      );
      return { key, piece, value, row };
    });
    const pieces = this.items.map(({ piece }) => piece);
    this.bar = el("div", { class: "parts", "aria-hidden": "true" }, ...pieces);
    this.list = el("dl", { class: "legend wide" }, ...this.items.map(({ row }) => row));
    host.append(this.bar, this.list);
  }

  show(values, whole, format) {
    for (const { key, piece, value } of this.items) {
      const part = values[key] || 0;
      const width = `${whole > 0 ? (part / whole) * 100 : 0}%`;
      if (piece.style.width !== width) piece.style.width = width;
      setText(value, format(part, whole));
    }
  }
}

/** Parts, or a text in their place while there is nothing to divide. */
export class PartsOrText {
  constructor(host, parts) {
    this.drawn = el("div");
    this.parts = new Parts(this.drawn, parts);
    this.text = el("p", { class: "empty" });
    host.append(this.drawn, this.text);
  }

  show(values, whole, format) {
    this.drawn.hidden = false;
    this.text.hidden = true;
    this.parts.show(values, whole, format);
  }

  showText(text) {
    this.drawn.hidden = true;
    this.text.hidden = false;
    setText(this.text, text);
  }
}
