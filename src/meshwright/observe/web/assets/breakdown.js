// Where the time of a step goes: a bar for each rank, and above them what the plan expects.

import { seconds } from "./format.js";
import { Picture, element, scale, shape, swatch, ticks, toggle } from "./draw.js";

export const PARTS = [
  "data", "forward", "backward", "recompute", "compute", "communication", "reduce", "bubble", "idle", "optimizer", "offload",
  "evaluate", "checkpoint", "hooks", "other", "unattributed",
];
const OF_PLAN = { tp: "communication", cp: "communication", ep: "communication", dp: "communication", correction: "other" };
const MOST_BARS = 64;
const LEFT = 58;

export class Breakdown {
  constructor(card) {
    this.card = card;
    this.profiled = false;
    this.at = null;
    this.bars = [];
    this.button = toggle("profiled step", false, (on) => {
      this.profiled = on;
      this.update(this.run);
    });
    this.picture = new Picture(card, "Step by rank", {
      redraw: () => this.draw(),
      move: (how) => this.move(how),
      table: () => this.table(),
      controls: [this.button],
    });
  }

  update(run) {
    this.run = run;
    const profiled = run.ranks.filter((rank) => rank.profiled);
    this.button.hidden = !profiled.length;
    const measured = this.profiled && profiled.length ? profiled.map((rank) => [rank.rank, rank.profiled.parts]) : run.ranks.map((rank) => [rank.rank, rank.parts]);
    const known = measured.filter(([, parts]) => Object.keys(parts).length);
    this.bars = grouped(known);
    const planned = inOurParts(run.comparison.parts);
    if (Object.keys(planned).length) this.bars.unshift({ label: "plan", name: "the plan", parts: planned });
    this.card.hidden = !known.length && !Object.keys(planned).length;
    this.picture.note.textContent = note(this.profiled && profiled.length ? profiled[0].profiled.step : null, known.length);
    this.draw();
    this.picture.fillTable();
  }

  names() {
    return PARTS.filter((part) => this.bars.some((bar) => bar.parts[part] > 0));
  }

  draw() {
    const { picture, bars } = this;
    if (!picture.width || this.card.hidden || !this.run) return;
    const tall = bars.length > 20 ? 9 : bars.length > 9 ? 15 : 22;
    const gap = tall > 12 ? 5 : 2;
    const height = bars.length * (tall + gap) + 32;
    picture.size(height);
    const longest = Math.max(...bars.map(total));
    const x = scale(0, longest || 1, LEFT, picture.width - 10);
    picture.drawing.replaceChildren();
    for (const value of ticks(0, longest, Math.max(2, picture.width / 120))) {
      picture.drawing.append(
        shape("g", { class: "grid" }, shape("line", { x1: x(value), x2: x(value), y1: 0, y2: height - 20 })),
        shape("text", { x: x(value), y: height - 6, "text-anchor": value ? "middle" : "start" }, value ? seconds(value) : "0"),
      );
    }
    this.rows = bars.map((bar, place) => {
      const y = place * (tall + gap) + (place && bars[0].label === "plan" ? 8 : 0);
      let from = 0;
      const drawn = shape("g");
      for (const part of PARTS.filter((name) => bar.parts[name] > 0)) {
        const wide = Math.max(0.3, x(from + bar.parts[part]) - x(from));
        drawn.append(shape("rect", { class: `part-${part}`, x: x(from), y, width: wide, height: tall }));
        from += bar.parts[part];
      }
      const labelled = tall > 12 || place === 0 || place % 4 === (bars[0].label === "plan" ? 1 : 0);
      if (labelled) drawn.append(shape("text", { x: LEFT - 8, y: y + tall / 2 + 4, "text-anchor": "end", class: place === 0 && bar.label === "plan" ? "strong" : null }, bar.label));
      picture.drawing.append(drawn);
      return { y, tall: tall + gap };
    });
    const names = this.names();
    picture.legend.replaceChildren(...names.map((part) => element("span", {}, swatch(`part-${part}`), part)));
    picture.describe(bars.map((bar) => `${bar.name}: ${seconds(total(bar))}.`).slice(0, 12).join(" "));
    this.drawCursor();
  }

  move({ y, by, leave }) {
    if (leave || !this.bars.length) this.at = null;
    else if (y !== undefined) this.at = Math.max(0, this.rows.findIndex((row) => y < row.y + row.tall));
    else this.at = Math.max(0, Math.min(this.bars.length - 1, this.at === null ? 0 : by === -Infinity ? 0 : this.at + by));
    this.drawCursor();
  }

  drawCursor() {
    const { overlay, readout, width } = this.picture;
    overlay.replaceChildren();
    const bar = this.at === null ? null : this.bars[this.at];
    if (!bar || !this.rows?.[this.at]) {
      readout.textContent = "";
      return;
    }
    const row = this.rows[this.at];
    overlay.append(shape("rect", { class: "current", x: LEFT - 2, y: row.y - 1, width: width - LEFT - 6, height: row.tall - 1, rx: 3 }));
    const parts = PARTS.filter((name) => bar.parts[name] > 0).map((name) => `${name} ${seconds(bar.parts[name])}`);
    readout.textContent = `${bar.name}: ${seconds(total(bar))} (${parts.join(", ")})`;
  }

  table() {
    const names = this.names();
    return {
      columns: ["rank", ...names, "in all"],
      rows: this.bars.map((bar) => [bar.label, ...names.map((part) => (bar.parts[part] ? seconds(bar.parts[part]) : "")), seconds(total(bar))]),
    };
  }
}

function note(step, ranks) {
  if (!ranks) return "no rank has recorded its steps; the plan alone";
  return step === null ? "mean of the newest steps" : `step ${step}`;
}

function total(bar) {
  return Object.values(bar.parts).reduce((sum, value) => sum + value, 0);
}

function inOurParts(planned) {
  const found = {};
  for (const [name, value] of Object.entries(planned)) {
    const part = OF_PLAN[name] ?? name;
    found[part] = (found[part] ?? 0) + value;
  }
  return found;
}

// A bar for each rank, or for as many neighbours as it takes to have few enough bars.
function grouped(known) {
  const size = Math.ceil(known.length / MOST_BARS);
  const bars = [];
  for (let first = 0; first < known.length; first += size || 1) {
    const group = known.slice(first, first + size);
    const parts = {};
    for (const [, one] of group) for (const [part, value] of Object.entries(one)) parts[part] = (parts[part] ?? 0) + value / group.length;
    const [from, to] = [group[0][0], group[group.length - 1][0]];
    bars.push(from === to ? { label: `rank ${from}`, name: `rank ${from}`, parts } : { label: `${from}–${to}`, name: `ranks ${from} to ${to}, the mean`, parts });
  }
  return bars;
}
