// Elements, scales and the frame that every picture shares: heading, drawing, readout, table.

const SVG = "http://www.w3.org/2000/svg";

export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function shape(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function scale(low, high, start, end, log = false) {
  const change = log ? Math.log10 : (value) => value;
  const span = change(high) - change(low) || 1;
  const place = (value) => start + ((change(value) - change(low)) / span) * (end - start);
  place.low = low;
  place.high = high;
  return place;
}

export function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) found.push(index * step || 0);
  return found;
}

export function logTicks(low, high, wanted) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const factor of [1, 2, 5]) {
      const value = factor * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  if (found.length < 2) return ticks(low, high, wanted);
  const whole = found.filter((value) => Math.abs(Math.log10(value) % 1) < 1e-9);
  return found.length > wanted * 1.6 && whole.length > 1 ? whole : found;
}

// Where a cursor among so many places goes by a key: from nowhere to the first, by End to the last.
export function moved(at, by, count) {
  if (!Number.isFinite(by)) return by < 0 ? 0 : count - 1;
  return at === null ? 0 : Math.max(0, Math.min(count - 1, at + by));
}

let identity = 0;

// A card with a heading, controls, a drawing that takes the keyboard, a line that says what is under the cursor, and a
// table with the same numbers.
export class Picture {
  constructor(card, title, { redraw, move = null, table = null, controls = [] }) {
    this.card = card;
    this.redraw = redraw;
    this.makeTable = table;
    this.id = `picture-${identity++}`;
    this.heading = element("h2", { id: `${this.id}-name` }, title);
    this.note = element("span", { class: "quiet" });
    this.svg = shape("svg", { role: "img", tabindex: move ? 0 : null, "aria-labelledby": `${this.id}-title ${this.id}-desc` });
    this.titleLine = shape("title", { id: `${this.id}-title` }, title);
    this.description = shape("desc", { id: `${this.id}-desc` });
    this.drawing = shape("g");
    this.overlay = shape("g");
    this.svg.append(this.titleLine, this.description, this.drawing, this.overlay);
    this.tip = element("div", { class: "tip", hidden: true });
    this.readout = element("p", { class: "readout", "aria-live": "polite" });
    this.legend = element("div", { class: "legend" });
    this.holder = element("div", { class: "picture" }, this.svg, this.tip);
    const controlled = element("div", { class: "controls" }, ...controls);
    card.setAttribute("aria-labelledby", `${this.id}-name`);
    card.append(element("div", { class: "head" }, this.heading, this.note, controlled), this.holder, this.legend);
    this.foot = element("div", { class: "foot" }, this.readout);
    card.append(this.foot);
    if (table) this.addTable();
    if (move) this.listen(move);
    this.width = 0;
    new ResizeObserver(() => {
      const width = Math.floor(this.holder.clientWidth);
      if (width && width !== this.width) {
        this.width = width;
        this.redraw();
      }
    }).observe(this.holder);
  }

  size(height) {
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${height}`);
    this.svg.setAttribute("height", height);
  }

  // How wide the widest of some texts is, in the fonts of this browser.
  widest(texts, kind = null) {
    const probe = shape("text", { class: kind, visibility: "hidden" });
    this.svg.append(probe);
    const wide = texts.map((text) => {
      probe.textContent = text;
      return probe.getComputedTextLength();
    });
    probe.remove();
    return Math.max(0, ...wide);
  }

  // The label of a place on an axis, which ends at the drawing's edge where it would go beyond it.
  tickLabel(at, y, text, anchor) {
    const beyond = at + this.widest([text]) / 2 > this.width;
    return shape("text", { x: beyond ? this.width : at, y, "text-anchor": beyond ? "end" : anchor }, text);
  }

  describe(text) {
    if (this.description.textContent !== text) this.description.textContent = text;
  }

  listen(move) {
    const keys = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    this.svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return move({ leave: true });
      if (!(event.key in keys) || event.ctrlKey || event.altKey || event.metaKey) return undefined;
      event.preventDefault();
      return move({ by: keys[event.key] * (event.shiftKey ? 10 : 1), vertical: event.key === "ArrowUp" || event.key === "ArrowDown" });
    });
    const point = (event) => {
      const box = this.svg.getBoundingClientRect();
      move({ x: event.clientX - box.left, y: event.clientY - box.top });
    };
    this.svg.addEventListener("pointermove", point);
    this.svg.addEventListener("pointerdown", point);
    this.svg.addEventListener("pointerleave", () => move({ leave: true }));
    this.svg.addEventListener("blur", () => move({ leave: true }));
  }

  addTable() {
    const body = element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Numbers: ${this.heading.textContent}` });
    this.details = element("details", {}, element("summary", {}, "Numbers"), body);
    this.details.addEventListener("toggle", () => this.fillTable());
    this.tableBody = body;
    this.foot.prepend(this.details);
  }

  fillTable() {
    if (this.details?.open) this.tableBody.replaceChildren(tableOf(this.makeTable()));
  }
}

// `words` are columns of text, `optional` those that a narrow page leaves out.
export function tableOf({ columns, rows, words = [], optional = [] }) {
  const kind = (place) => `${words.includes(place) ? "words" : ""}${optional.includes(place) ? " optional" : ""}`.trim() || null;
  const head = element("tr", {}, ...columns.map((name, place) => element("th", { scope: "col", class: kind(place) }, name)));
  const lines = rows.map((row) => element("tr", {}, ...row.map((cell, place) => element("td", { class: kind(place) }, String(cell ?? "")))));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...lines));
}

export function toggle(text, pressed, change) {
  const button = element("button", { type: "button", "aria-pressed": String(pressed) }, text);
  button.addEventListener("click", () => {
    const now = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(now));
    change(now);
  });
  return button;
}

const COLOURS = 6;

// How the curves of one of several runs look: there are six colours, and after them the same again in other strokes.
export function lookOf(place) {
  return { color: place % COLOURS, again: Math.floor(place / COLOURS) % 4 };
}

export function strokeOf({ color, again = 0, dashed = false }) {
  return `stroke-${color}${dashed ? " dashed" : again ? ` again-${again}` : ""}`;
}

// A point of a curve: what is round for the first six runs has corners for others.
export function dot({ color, again = 0 }, x, y, size) {
  const ways = [
    `M${x - size} ${y}a${size} ${size} 0 1 0 ${2 * size} 0a${size} ${size} 0 1 0 ${-2 * size} 0z`,
    `M${x - size} ${y - size}h${2 * size}v${2 * size}h${-2 * size}z`,
    `M${x} ${y - size * 1.4}l${size * 1.4} ${size * 1.4}l${-size * 1.4} ${size * 1.4}l${-size * 1.4} ${-size * 1.4}z`,
    `M${x} ${y - size * 1.2}l${size * 1.2} ${size * 2.2}h${-size * 2.4}z`,
  ];
  return shape("path", { class: `dot fill-${color}`, d: ways[again] });
}

// A piece of a curve as it is drawn, for a legend.
export function lineKey(line) {
  return shape("svg", { class: "line-key", width: 24, height: 10, "aria-hidden": "true" },
    shape("path", { class: `sample ${strokeOf(line)}`, d: "M1.5 5H22.5" }),
    line.sparse ? dot(line, 12, 5, 3) : null);
}

export function swatch(kind) {
  return element("i", { class: `swatch ${kind}`, "aria-hidden": "true" });
}
