// The mesh: a cell for each rank, stage under stage of the pipeline, copies of the model beside each other.

import { bytes } from "./format.js";
import { Picture, element, moved, shape } from "./draw.js";
import { holdsSeveral } from "./pipeline.js";

const LEFT = 46;
const LARGEST = 118;
const SMALLEST = 13;
const LETTER = 6.4;
const LINE = 13;
const STATES = { alive: "alive", lost: "lost", waiting: "waits for the others", ended: "ended", unknown: "no sign" };

export class Mesh {
  constructor(card) {
    this.card = card;
    this.at = null;
    this.ranks = [];
    this.picture = new Picture(card, "Mesh", {
      redraw: () => this.draw(),
      move: (how) => this.move(how),
      table: () => this.table(),
    });
  }

  update(run) {
    this.run = run;
    this.ranks = run.ranks;
    this.card.hidden = !run.ranks.length;
    const axes = Object.entries(run.degrees).filter(([, degree]) => degree > 1).map(([axis, degree]) => `${axis} ${degree}`);
    this.picture.note.textContent = [`${run.world} rank${run.world === 1 ? "" : "s"}`, ...axes].join(" · ");
    this.draw();
    this.picture.fillTable();
  }

  // Stages are rows; within one, ranks of a data-parallel place stand together.
  layout() {
    const { pp = 1, cp = 1, tp = 1 } = this.run.degrees;
    const together = cp * tp;
    const columns = Math.max(1, this.ranks.length / pp);
    const left = pp > 1 ? LEFT : 2;
    const room = this.picture.width - left - 4;
    const between = together > 1 ? 7 : 3;
    const groups = Math.max(1, columns / together);
    let cell = Math.min(LARGEST, Math.floor((room - between * (groups - 1) - (columns - groups)) / columns));
    let perRow = columns;
    if (cell < SMALLEST) {
      cell = SMALLEST;
      perRow = Math.max(1, Math.floor((room + between) / (together * (cell + 1) - 1 + between))) * together;
    }
    const spread = this.spread(cell);
    const lines = Math.max(0, ...this.ranks.map((rank) => this.lines(rank, cell, spread).length));
    const tall = Math.max(Math.min(cell, 46), lines > 1 ? lines * LINE + 7 : 0);
    const places = new Map();
    const inRow = new Map();
    let bottom = 0;
    for (const rank of this.ranks) {
      const stage = rank.at.pp ?? 0;
      const place = inRow.get(stage) ?? 0;
      inRow.set(stage, place + 1);
      const rows = Math.ceil(columns / perRow);
      const line = Math.floor(place / perRow);
      const within = place % perRow;
      const x = left + within * (cell + 1) + Math.floor(within / together) * (between - 1);
      const y = stage * (rows * (tall + 3) + 7) + line * (tall + 3) + 1;
      places.set(rank.rank, { x, y });
      bottom = Math.max(bottom, y + tall);
    }
    return { cell, tall, places, bottom, left, pp, spread };
  }

  // A rank's place within its row: the axes that are split, but for the stage, which the row tells.
  place(rank) {
    return ["dp", "cp", "tp", "ep"].filter((axis) => (this.run.degrees[axis] ?? 1) > 1 && axis in rank.at).map((axis) => `${axis}${rank.at[axis]}`);
  }

  // How places are written in cells of a width: in one line, an axis a line, or not at all.
  spread(cell) {
    const longest = (texts) => Math.max(0, ...texts.map((text) => text.length)) * LETTER + 4;
    const places = this.ranks.map((rank) => this.place(rank));
    if (longest(places.map((place) => place.join(" "))) <= cell) return (place) => [place.join(" ")].filter(Boolean);
    return longest(places.flat()) <= cell ? (place) => place : () => [];
  }

  // What a cell says: rank, place, memory, as far as there is room.
  lines(rank, cell, spread) {
    if (cell < 18) return [];
    return [String(rank.rank), ...spread(this.place(rank)), cell >= 46 && held(rank) && bytes(held(rank))].filter(Boolean);
  }

  draw() {
    const { picture } = this;
    if (!picture.width || this.card.hidden || !this.run) return;
    const shown = this.layout();
    this.shown = shown;
    picture.size(shown.bottom + 3);
    picture.drawing.replaceChildren();
    const most = Math.max(this.run.comparison.capacity ?? 0, ...this.ranks.map((rank) => held(rank) ?? 0));
    const labelled = new Set();
    for (const rank of this.ranks) {
      const { x, y } = shown.places.get(rank.rank);
      const stage = rank.at.pp ?? 0;
      if (shown.pp > 1 && !labelled.has(stage)) {
        labelled.add(stage);
        picture.drawing.append(shape("text", { x: 0, y: y + shown.tall / 2 + 4 }, `${holdsSeveral(this.run.pipeline) ? "pp" : "stage"} ${stage}`));
      }
      picture.drawing.append(this.cell(rank, x, y, shown, most));
    }
    this.drawLegend();
    const lost = this.ranks.filter((rank) => rank.state === "lost").map((rank) => rank.rank);
    picture.describe(`${this.ranks.length} ranks. ${lost.length ? `Lost: ${lost.join(", ")}.` : "None is lost."}`);
    this.drawCursor();
  }

  cell(rank, x, y, { cell, tall, spread }, most) {
    const size = held(rank);
    const kind = `cell ${rank.state}${rank.straggler ? " slow" : ""}`;
    const corner = Math.min(6, cell / 5);
    const group = shape("g", { "data-rank": rank.rank, "data-state": rank.state });
    group.append(shape("rect", { class: kind, x: x + 0.5, y: y + 0.5, width: cell - 1, height: tall - 1, rx: corner }));
    if (size && most) {
      const level = (tall - 3) * Math.min(1, size / most);
      group.append(shape("rect", { class: "level", x: x + 1.5, y: y + tall - 1.5 - level, width: cell - 3, height: level, rx: corner * 0.7 }));
    }
    this.lines(rank, cell, spread).forEach((text, line, all) => {
      const kind = rank.state === "lost" ? "on-lost" : line === 0 ? "strong" : null;
      const below = tall / 2 + 4 + (line - (all.length - 1) / 2) * LINE;
      group.append(shape("text", { class: kind, x: x + cell / 2, y: y + below, "text-anchor": "middle" }, text));
    });
    if (rank.failures && rank.state !== "lost") group.append(shape("circle", { class: "again", cx: x + cell - 5, cy: y + 5, r: Math.min(3, cell / 6) }));
    group.append(shape("title", {}, this.inWords(rank)));
    return group;
  }

  drawLegend() {
    const key = (kind, text) => element("span", {}, element("i", { class: `key ${kind}`, "aria-hidden": "true" }), text);
    const has = (test) => this.ranks.some(test);
    this.picture.legend.replaceChildren(...[
      has((rank) => rank.state === "alive") && key("alive", "alive"),
      has((rank) => rank.state === "ended") && key("", "ended"),
      has((rank) => rank.state === "lost") && key("lost", "lost"),
      has((rank) => rank.state === "waiting") && key("waiting", "waits for the others"),
      has((rank) => rank.state === "unknown") && key("unknown", "no sign"),
      has((rank) => rank.failures && rank.state !== "lost") && key("failed-before", "failed before"),
      has((rank) => rank.straggler) && key("slow", "slower than the others"),
      has((rank) => held(rank)) && key("memory", "memory held"),
    ].filter(Boolean));
  }

  inWords(rank) {
    const place = Object.entries(rank.at).filter(([axis]) => (this.run.degrees[axis] ?? 2) > 1).map(([axis, at]) => `${axis} ${at}`);
    const words = [`rank ${rank.rank}${place.length ? ` (${place.join(", ")})` : ""}`, STATES[rank.state] ?? rank.state];
    if (held(rank)) words.push(bytes(held(rank)));
    if (rank.host) words.push(`on ${rank.host}`);
    if (rank.straggler) words.push(`slow in ${rank.straggler.phase}`);
    if (rank.failures) words.push(`failed ${rank.failures} time${rank.failures > 1 ? "s" : ""}${rank.failed ? `, last: ${rank.failed}` : ""}`);
    return words.join(" · ");
  }

  move({ x, y, by, vertical, leave }) {
    if (leave || !this.ranks.length) this.at = null;
    else if (x !== undefined) {
      const { places, cell, tall } = this.shown;
      const under = this.ranks.find((rank) => {
        const at = places.get(rank.rank);
        return x >= at.x && x < at.x + cell + 1 && y >= at.y && y < at.y + tall + 3;
      });
      this.at = under ? under.rank : null;
    } else {
      const stages = this.run.degrees.pp ?? 1;
      const step = vertical && stages > 1 ? by * (this.ranks.length / stages) : by;
      if (this.at === null || !Number.isFinite(by)) this.at = moved(null, by, this.ranks.length);
      else if (this.at + step >= 0 && (this.at + step < this.ranks.length || !vertical)) this.at = Math.min(this.ranks.length - 1, this.at + step);
    }
    this.drawCursor();
  }

  drawCursor() {
    const { overlay, readout } = this.picture;
    overlay.replaceChildren();
    const rank = this.at === null ? null : this.ranks[this.at];
    readout.textContent = rank ? this.inWords(rank) : "";
    if (!rank) return;
    const { places, cell, tall } = this.shown;
    const { x, y } = places.get(rank.rank);
    overlay.append(shape("rect", { class: "current", x: x + 0.5, y: y + 0.5, width: cell - 1, height: tall - 1, rx: Math.min(6, cell / 5) }));
  }

  table() {
    const axes = ["pp", "dp", "cp", "tp", "ep"].filter((axis) => (this.run.degrees[axis] ?? 1) > 1);
    return {
      columns: ["rank", ...axes, "state", "memory", "host", "failures"],
      rows: this.ranks.map((rank) => [rank.rank, ...axes.map((axis) => rank.at[axis] ?? ""), STATES[rank.state] ?? rank.state, bytes(held(rank)), rank.host ?? "", rank.failures || ""]),
    };
  }
}

// What the figure of the peak memory counts: on a GPU all that was held of it, else the process.
export function held(rank) {
  return rank.memory.held ?? rank.memory.peak ?? rank.memory.reserved ?? rank.memory.rss ?? null;
}
