// Where the time of a step goes: a bar for each rank, and above them what the plan expects. Waiting for other ranks is apart
// from the passes as far as a profiled step tells it; where none does, names say that it is in them.

import { seconds } from "./format.js";
import { Picture, scale, shape, ticks, toggle } from "./draw.js";
import { PARTS, drawPart, partKey } from "./parts.js";

const ORDER = Object.keys(PARTS);
const MAY_WAIT = ["forward", "backward", "reduce", "optimizer"];
const OF_PLAN = { tp: "communication", cp: "communication", ep: "communication", dp: "communication", correction: "other" };
const MOST_BARS = 64;
const LEFT = 58;

export class Breakdown {
  constructor(card) {
    this.card = card;
    this.profiled = false;
    this.at = null;
    this.bars = [];
    this.button = toggle("profiled step alone", false, (on) => {
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
    const alone = this.profiled && profiled.length > 0;
    const recorded = run.ranks.filter((rank) => Object.keys(rank.parts).length);
    const hiding = alone ? [] : recorded.filter((rank) => rank.waits_of === null);
    this.hidden = hiding.length > 0 && run.world > 1;
    this.picture.note.textContent = alone ? `step ${profiled[0].profiled.step} under the profiler, which makes it longer` : note(recorded, this.hidden ? hiding : [], run);
    this.draw();
    this.picture.fillTable();
  }

  names() {
    return ORDER.filter((part) => this.bars.some((bar) => bar.parts[part] > 0));
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
      const drawn = shape("g", { "data-bar": bar.label });
      for (const part of ORDER.filter((name) => bar.parts[name] > 0)) {
        const wide = Math.max(0.3, x(from + bar.parts[part]) - x(from));
        drawn.append(drawPart(part, `${this.called(part)} ${seconds(bar.parts[part])}`, { x: x(from), y, width: wide, height: tall }));
        from += bar.parts[part];
      }
      const labelled = tall > 12 || place === 0 || place % 4 === (bars[0].label === "plan" ? 1 : 0);
      if (labelled) drawn.append(shape("text", { x: LEFT - 8, y: y + tall / 2 + 4, "text-anchor": "end", class: place === 0 && bar.label === "plan" ? "strong" : null }, bar.label));
      picture.drawing.append(drawn);
      return { y, tall: tall + gap };
    });
    const names = this.names();
    picture.legend.replaceChildren(...names.map((part) => partKey(part, this.called(part))));
    const waits = (bar) => ["communication", "bubble"].filter((part) => bar.parts[part] > 0).map((part) => `, ${PARTS[part].label} ${seconds(bar.parts[part])}`).join("");
    picture.describe(`${picture.note.textContent}. ${bars.map((bar) => `${bar.name}: ${seconds(total(bar))}${waits(bar)}.`).slice(0, 12).join(" ")}`);
    this.drawCursor();
  }

  called(part) {
    return this.hidden && MAY_WAIT.includes(part) ? `${PARTS[part].label} with waiting` : PARTS[part].label;
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
    const parts = ORDER.filter((name) => bar.parts[name] > 0).map((name) => `${this.called(name)} ${seconds(bar.parts[name])}`);
    readout.textContent = `${bar.name}: ${seconds(total(bar))} (${parts.join(", ")})`;
  }

  table() {
    const names = this.names();
    return {
      columns: ["rank", ...names.map((part) => this.called(part)), "in all"],
      rows: this.bars.map((bar) => [bar.label.replace(" ", "\u00a0"), ...names.map((part) => (bar.parts[part] ? seconds(bar.parts[part]) : "")), seconds(total(bar))]),
    };
  }
}

function note(recorded, hiding, run) {
  if (!recorded.length) return "no rank has recorded its steps; the plan alone";
  const mean = `mean of the last ${run.speeds.steps} steps`;
  if (run.world === 1) return mean;
  if (hiding.length === recorded.length) return `${mean}; no step was profiled: waiting for other ranks is in the passes`;
  if (hiding.length) return `${mean}; of ${hiding.length} rank${hiding.length > 1 ? "s" : ""} no step was profiled: there waiting for others is in the passes`;
  return `${mean}; waiting as in profiled step ${Math.max(...recorded.map((rank) => rank.waits_of))}`;
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
