// Where the time of a step goes: a bar for each rank, and above them what the plan expects. Waiting for other ranks is apart
// from the passes as far as a profiled step tells it; where none does, names say that it is in them.

import { seconds } from "./format.js";
import { Picture, moved, scale, shape, ticks, toggle } from "./draw.js";
import { BESIDE, PARTS, besideKey, drawBeside, drawPart, partKey } from "./parts.js";

const ORDER = Object.keys(PARTS);
const MAY_WAIT = ["forward", "backward", "reduce", "optimizer"];
const OF_PLAN = { tp: "communication", cp: "communication", ep: "communication", dp: "communication", paths: "communication", correction: "other" };
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
    const alone = this.profiled && profiled.length > 0;
    const measured = alone ? profiled.map((rank) => [rank.rank, rank.profiled.parts, rank.profiled]) : run.ranks.map((rank) => [rank.rank, rank.parts, {}]);
    const known = measured.filter(([, parts]) => Object.keys(parts).length);
    this.bars = grouped(known);
    const planned = inOurParts(run.comparison.parts);
    if (Object.keys(planned).length) this.bars.unshift({ label: "plan", name: "the plan", parts: planned, beside: {} });
    this.card.hidden = !known.length && !Object.keys(planned).length;
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

  besides() {
    return Object.keys(BESIDE).filter((name) => this.bars.some((bar) => typeof bar.beside[name] === "number"));
  }

  draw() {
    const { picture, bars } = this;
    if (!picture.width || this.card.hidden || !this.run) return;
    const tall = bars.length > 20 ? 9 : bars.length > 9 ? 15 : 22;
    const besides = this.besides();
    const strip = !besides.length ? 0 : tall > 12 ? 7 : 4;
    const gap = (tall > 12 ? 5 : 2) + strip;
    const height = bars.length * (tall + gap) + 32;
    picture.size(height);
    const longest = Math.max(...bars.map((bar) => Math.max(total(bar), sum(bar.beside))));
    const x = scale(0, longest || 1, LEFT, picture.width - 10);
    picture.drawing.replaceChildren();
    for (const value of ticks(0, longest, Math.max(2, picture.width / 120))) {
      const at = x(value);
      picture.drawing.append(
        shape("g", { class: "grid" }, shape("line", { x1: at, x2: at, y1: 0, y2: height - 20 })),
        picture.tickLabel(at, height - 6, value ? seconds(value) : "0", value ? "middle" : "start"),
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
      let beside = 0;
      for (const name of besides.filter((one) => bar.beside[one] > 0)) {
        const wide = Math.max(0.3, x(beside + bar.beside[name]) - x(beside));
        drawn.append(drawBeside(name, `${BESIDE[name].short} ${seconds(bar.beside[name])}`, { x: x(beside), y: y + tall + 1, width: wide, height: strip - 1 }));
        beside += bar.beside[name];
      }
      const labelled = tall > 12 || place === 0 || place % 4 === (bars[0].label === "plan" ? 1 : 0);
      if (labelled) drawn.append(shape("text", { x: LEFT - 8, y: y + tall / 2 + 4, "text-anchor": "end", class: place === 0 && bar.label === "plan" ? "strong" : null }, bar.label));
      picture.drawing.append(drawn);
      return { y, tall: tall + gap };
    });
    const names = this.names();
    picture.legend.replaceChildren(...names.map((part) => partKey(part, this.called(part))), ...besides.filter((name) => bars.some((bar) => bar.beside[name] > 0)).map(besideKey));
    const waits = (bar) => ["communication", "bubble"].filter((part) => bar.parts[part] > 0).map((part) => `, ${PARTS[part].label} ${seconds(bar.parts[part])}`).join("");
    picture.describe(`${picture.note.textContent}. ${bars.map((bar) => `${bar.name}: ${seconds(total(bar))}${waits(bar)}${besideInWords(bar)}.`).slice(0, 12).join(" ")}`);
    this.drawCursor();
  }

  called(part) {
    return this.hidden && MAY_WAIT.includes(part) ? `${PARTS[part].label} with waiting` : PARTS[part].label;
  }

  move({ y, by, leave }) {
    if (leave || !this.bars.length) this.at = null;
    else if (y !== undefined) this.at = Math.max(0, this.rows.findIndex((row) => y < row.y + row.tall));
    else this.at = moved(this.at, by, this.bars.length);
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
    readout.textContent = `${bar.name}: ${seconds(total(bar))} (${parts.join(", ")})${besideInWords(bar)}`;
  }

  table() {
    const [names, besides] = [this.names(), this.besides()];
    const cell = (value) => (value ? seconds(value) : "");
    return {
      columns: ["rank", ...names.map((part) => this.called(part)), "in all", ...besides.map((name) => BESIDE[name].label)],
      rows: this.bars.map((bar) => [
        bar.label.replace(" ", "\u00a0"), ...names.map((part) => cell(bar.parts[part])), seconds(total(bar)),
        ...besides.map((name) => (bar.label === "plan" ? "" : seconds(bar.beside[name]))),
      ]),
    };
  }
}

function note(recorded, hiding, run) {
  if (!recorded.length) return "no rank has recorded its steps; the plan alone";
  const mean = meanOf(recorded, run.speeds.steps);
  if (run.world === 1) return mean;
  if (hiding.length === recorded.length) return `${mean}; no step was profiled: waiting for other ranks is in the passes`;
  if (hiding.length) return `${mean}; of ${hiding.length} rank${hiding.length > 1 ? "s" : ""} no step was profiled: there waiting for others is in the passes`;
  return `${mean}; waiting as in profiled step ${Math.max(...recorded.map((rank) => rank.waits_of))}`;
}

// Profiled steps are longer than others, and no part of the mean.
function meanOf(recorded, steps) {
  const counts = recorded.map((rank) => rank.mean_of);
  const [fewest, most] = [counts.reduce((a, b) => Math.min(a, b)), counts.reduce((a, b) => Math.max(a, b))];
  const among = steps > most ? ` of the last ${steps}, profiled ones left out` : "";
  return `mean of ${among ? "" : "the last "}${fewest === most ? most : `${fewest} to ${most}`} step${most === 1 ? "" : "s"}${among}`;
}

function besideInWords(bar) {
  const known = Object.keys(BESIDE).filter((name) => typeof bar.beside[name] === "number");
  return known.map((name) => `; ${BESIDE[name].label}: ${seconds(bar.beside[name])}`).join("");
}

function total(bar) {
  return sum(bar.parts);
}

function sum(shares) {
  return Object.values(shares).reduce((all, value) => all + value, 0);
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
    const [parts, beside] = [{}, {}];
    for (const [, one, profiled] of group) {
      for (const [part, value] of Object.entries(one)) parts[part] = (parts[part] ?? 0) + value / group.length;
      for (const name of Object.keys(BESIDE)) if (typeof profiled[name] === "number") beside[name] = (beside[name] ?? 0) + profiled[name] / group.length;
    }
    const [from, to] = [group[0][0], group[group.length - 1][0]];
    bars.push(from === to ? { label: `rank ${from}`, name: `rank ${from}`, parts, beside } : { label: `${from}–${to}`, name: `ranks ${from} to ${to}, the mean`, parts, beside });
  }
  return bars;
}
