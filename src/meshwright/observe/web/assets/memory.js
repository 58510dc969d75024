// What was expected beside what came: memory by kind as bars, the other figures as a table.

import { bytes, byUnit, signedPercent } from "./format.js";
import { Picture, element, moved, scale, shape, tableOf } from "./draw.js";

const ROW = 44;
const LEFT = 6;

export class Memory {
  constructor(card) {
    this.card = card;
    this.pairs = [];
    this.at = null;
    this.figures = element("div");
    this.picture = new Picture(card, "Prediction beside measurement", {
      redraw: () => this.draw(),
      move: (how) => this.move(how),
      table: () => this.table(),
    });
    this.picture.holder.before(this.figures);
  }

  update(run) {
    const { figures, memory, fullest, unknown } = run.comparison;
    const known = figures.filter((figure) => figure.predicted !== null || figure.measured !== null);
    this.card.hidden = !known.length && !memory.length;
    this.run = run;
    this.pairs = memory;
    this.capacity = run.comparison.capacity;
    this.peak = figures.find((figure) => figure.name === "peak memory");
    this.picture.note.textContent = unknown || (fullest === null ? "" : `memory of rank ${fullest}, which holds most`);
    const made = tableOf({
      columns: ["", "predicted", "measured", "off by"],
      rows: known.map((one) => [one.name, byUnit(one.predicted, one.unit), byUnit(one.measured, one.unit), signedPercent(one.error)]),
    });
    const { steps } = run.speeds;
    this.figures.replaceChildren(made, ...(steps ? [element("p", { class: "quiet below-table" }, `Measured over the last ${steps} step${steps > 1 ? "s" : ""}: tokens/s and bubble are means, a step's time is the median.`)] : []));
    this.draw();
    this.picture.fillTable();
  }

  rows() {
    const all = this.peak && (this.peak.predicted !== null || this.peak.measured !== null) ? [{ ...this.peak, name: "all, at the peak" }] : [];
    return this.pairs.length ? [...this.pairs, ...all] : [];
  }

  draw() {
    const { picture } = this;
    if (!picture.width || this.card.hidden || !this.run) return;
    const rows = this.rows();
    for (const part of [picture.holder, picture.legend, picture.foot]) part.hidden = !rows.length;
    if (!rows.length) {
      picture.legend.replaceChildren();
      picture.describe("");
      this.at = null;
      this.drawCursor();
      return;
    }
    picture.size(rows.length * ROW + 4);
    const most = Math.max(...rows.flatMap((row) => [row.predicted ?? 0, row.measured ?? 0]));
    const x = scale(0, most || 1, LEFT, picture.width - 74);
    picture.drawing.replaceChildren();
    rows.forEach((row, place) => {
      const y = place * ROW + 4;
      picture.drawing.append(shape("text", { x: LEFT - 1, y: y + 10 }, row.name));
      this.bar(row.predicted, "predicted", x, y + 15);
      this.bar(row.measured, "measured", x, y + 27);
    });
    picture.legend.replaceChildren(
      element("span", {}, key("predicted"), "predicted"),
      element("span", {}, key("measured"), "measured"),
      ...(this.capacity ? [element("span", {}, `of ${bytes(this.capacity)}`)] : []),
    );
    picture.describe(rows.map((row) => `${inWords(row)}.`).join(" "));
    this.drawCursor();
  }

  move({ y, by, leave }) {
    const last = this.rows().length - 1;
    if (leave || last < 0) this.at = null;
    else if (y !== undefined) this.at = Math.max(0, Math.min(last, Math.floor((y - 4) / ROW)));
    else this.at = moved(this.at, by, last + 1);
    this.drawCursor();
  }

  drawCursor() {
    const { overlay, readout, width } = this.picture;
    overlay.replaceChildren();
    const row = this.at === null ? null : this.rows()[this.at];
    readout.textContent = row ? inWords(row) : "";
    if (row) overlay.append(shape("rect", { class: "current", x: 1, y: this.at * ROW + 2, width: width - 2, height: ROW - 1, rx: 3 }));
  }

  bar(value, kind, x, y) {
    if (value === null || value === undefined) return;
    const wide = Math.max(1, x(value) - x(0));
    this.picture.drawing.append(
      shape("rect", { class: kind, x: x(0), y, width: wide, height: 9, rx: 2 }),
      shape("text", { x: x(0) + wide + 6, y: y + 8.5 }, bytes(value)),
    );
  }

  table() {
    return {
      columns: ["kind", "predicted", "measured", "off by"],
      rows: this.rows().map((row) => [row.name, bytes(row.predicted), bytes(row.measured), signedPercent(row.error)]),
    };
  }
}

function inWords(row) {
  return `${row.name}: predicted ${bytes(row.predicted)}, measured ${bytes(row.measured)}`;
}

function key(kind) {
  return shape("svg", { width: 16, height: 10, "aria-hidden": "true" }, shape("rect", { class: kind, x: 1, y: 1, width: 14, height: 8, rx: 2 }));
}
