// The schedule of a pipeline: passes of each of its ranks over time, as simulated and as measured. Gaps are bubbles.

import { percent, seconds } from "./format.js";
import { Picture, element, scale, shape, swatch, ticks } from "./draw.js";

const LEFT = 58;
const NAMES = { F: "forward", B: "backward", I: "backward to the input", W: "backward to the weights" };
const KINDS = { F: "part-forward", B: "part-backward", I: "part-backward", W: "part-weights" };

// Whether ranks of a pipeline hold several stages each.
export function holdsSeveral(pipeline) {
  return Boolean(pipeline?.predicted.some((row) => row.some((pass) => pass[1] !== row[0][1])));
}

export class Pipeline {
  constructor(card) {
    this.card = card;
    this.at = null;
    this.picture = new Picture(card, "Pipeline", {
      redraw: () => this.draw(),
      move: (how) => this.move(how),
      table: () => this.table(),
    });
  }

  update(run) {
    const pipeline = run.pipeline;
    this.card.hidden = !pipeline;
    if (!pipeline) return;
    this.several = holdsSeveral(pipeline);
    const first = (rank) => !["dp", "cp", "tp"].some((axis) => rank.at[axis]);
    this.names = pipeline.predicted.map((row, place) => (this.several ? `rank ${run.ranks.find((rank) => first(rank) && rank.at.pp === place)?.rank ?? place}` : `stage ${place}`));
    const text = JSON.stringify([pipeline, this.names]);
    const changed = text !== this.text;
    this.text = text;
    this.pipeline = pipeline;
    this.idle = run.comparison.figures.find((figure) => figure.name === "pipeline bubble");
    const cut = pipeline.drawn < pipeline.micro_batches ? `, the first ${pipeline.drawn} drawn` : "";
    this.picture.note.textContent = `${pipeline.schedule}, ${pipeline.micro_batches} micro-batch${pipeline.micro_batches > 1 ? "es" : ""}${cut}`;
    if (changed) {
      this.draw();
      this.picture.fillTable();
    }
  }

  draw() {
    const { picture, pipeline } = this;
    if (!picture.width || this.card.hidden || !pipeline) return;
    const halves = [{ title: `predicted: ${percent(pipeline.predicted_idle)} idle, from ${pipeline.basis}`, rows: pipeline.predicted }];
    if (pipeline.measured) halves.push({ title: `measured in step ${pipeline.step}: ${percent(pipeline.measured_idle)} idle`, rows: pipeline.measured });
    const stages = pipeline.predicted.length;
    const tall = stages > 16 ? 10 : 18;
    const each = stages * (tall + 2) + 26;
    picture.size(halves.length * each + 18);
    // One scale for both, so that the longer one is seen to be longer.
    const ends = halves.flatMap((half) => half.rows.flatMap((row) => row.map((pass) => pass[4])));
    const x = scale(0, Math.max(...ends) || 1, LEFT, picture.width - 4);
    picture.drawing.replaceChildren();
    this.passes = [];
    halves.forEach((half, which) => this.drawHalf(half, which * each, tall, x, which));
    const bottom = halves.length * each + 12;
    for (const value of ticks(0, x.high, Math.max(2, picture.width / 160))) {
      picture.drawing.append(picture.tickLabel(x(value), bottom, value ? seconds(value) : "0", value ? "middle" : "start"));
    }
    const kinds = [...new Set(this.passes.map((pass) => pass.kind))];
    picture.legend.replaceChildren(
      ...kinds.map((kind) => element("span", {}, swatch(KINDS[kind]), NAMES[kind])),
      element("span", {}, swatch("lane"), "bubble"),
      ...(this.several ? [element("span", {}, "2:5 is micro-batch 5 in stage 2")] : []),
    );
    picture.describe(halves.map((half) => half.title).join(". "));
    this.drawCursor();
  }

  drawHalf(half, top, tall, x, which) {
    const { drawing, width } = this.picture;
    drawing.append(shape("text", { x: 0, y: top + 12, class: "strong" }, fit(half.title, width)));
    const end = Math.max(...half.rows.flatMap((row) => row.map((pass) => pass[4])));
    half.rows.forEach((row, rank) => {
      const y = top + 20 + rank * (tall + 2);
      drawing.append(shape("text", { x: LEFT - 8, y: y + tall / 2 + 4, "text-anchor": "end" }, tall > 12 || rank % 4 === 0 ? this.names[rank] : ""));
      drawing.append(shape("rect", { class: "lane", x: LEFT, y, width: x(end) - LEFT, height: tall, rx: 2 }));
      for (const [kind, stage, micro, start, stop] of row) {
        const wide = Math.max(0.6, x(stop) - x(start));
        drawing.append(shape("rect", { class: `pass ${KINDS[kind]}`, x: x(start), y, width: wide, height: tall, rx: wide > 6 ? 2 : 0 }));
        const label = this.several ? `${stage}:${micro}` : String(micro);
        if (wide > (this.several ? label.length * 5.4 + 3 : 15) && tall > 12) drawing.append(shape("text", { class: `on ${KINDS[kind]}`, x: x(start) + wide / 2, y: y + tall / 2 + 3.5, "text-anchor": "middle" }, label));
        this.passes.push({ kind, stage, micro, start, stop, rank, which, x: x(start), y, wide, tall });
      }
    });
  }

  move({ x, y, by, vertical, leave }) {
    if (leave || !this.passes?.length) this.at = null;
    else if (x !== undefined) {
      const found = this.passes.findIndex((pass) => x >= pass.x && x <= pass.x + pass.wide && y >= pass.y && y <= pass.y + pass.tall);
      this.at = found < 0 ? null : found;
    } else if (this.at === null) this.at = 0;
    else if (vertical && Number.isFinite(by)) {
      const now = this.passes[this.at];
      const rows = this.passes.filter((pass) => (by > 0 ? pass.y > now.y : pass.y < now.y));
      const y1 = by > 0 ? Math.min(...rows.map((pass) => pass.y)) : Math.max(...rows.map((pass) => pass.y));
      const row = rows.filter((pass) => pass.y === y1).sort((a, b) => Math.abs(a.start - now.start) - Math.abs(b.start - now.start));
      if (row.length) this.at = this.passes.indexOf(row[0]);
    } else this.at = Math.max(0, Math.min(this.passes.length - 1, by === -Infinity ? 0 : this.at + by));
    this.drawCursor();
  }

  drawCursor() {
    const { overlay, readout } = this.picture;
    overlay.replaceChildren();
    const pass = this.at === null ? null : this.passes?.[this.at];
    readout.textContent = "";
    if (!pass) return;
    overlay.append(shape("rect", { class: "current", x: pass.x, y: pass.y, width: Math.max(2, pass.wide), height: pass.tall, rx: 2 }));
    const how = pass.which ? "measured" : "predicted";
    readout.textContent = `${how}: ${this.several ? `${this.names[pass.rank]}, ` : ""}stage ${pass.stage}, ${NAMES[pass.kind]} of micro-batch ${pass.micro}, ${seconds(pass.stop - pass.start)} from ${seconds(pass.start)}`;
  }

  table() {
    return {
      columns: ["", ...(this.several ? ["on"] : []), "stage", "pass", "micro-batch", "start", "takes"],
      words: this.several ? [1, 3] : [2],
      rows: this.passes.slice(0, 600).map((pass) => [pass.which ? "measured" : "predicted", ...(this.several ? [this.names[pass.rank]] : []), pass.stage, NAMES[pass.kind], pass.micro, seconds(pass.start), seconds(pass.stop - pass.start)]),
    };
  }
}

// A heading that a narrow drawing has room for.
function fit(text, width) {
  const most = Math.floor(width / 6.9);
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}
