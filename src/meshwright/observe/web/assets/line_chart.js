// Curves over steps, of one run or several: cursor by pointer and by keyboard, logarithmic scale, events on the axis.

import { number } from "./format.js";
import { Picture, element, dot, lineKey, logTicks, scale, shape, strokeOf, ticks, toggle } from "./draw.js";

const HEIGHT = 250;
const MARGIN = { left: 52, right: 12, top: 10, bottom: 30 };
const MOST_ROWS = 200;

export class LineChart {
  // `format` writes a value; `zero` has the axis begin at 0; `smooth` draws a quieter curve over the measured one.
  constructor(card, title, { format = number, zero = false, smooth = false, log = false, controls = [] } = {}) {
    Object.assign(this, { format, zero, smooth, log, lines: [], marks: [], hidden: new Set(), at: null });
    const logarithmic = toggle("log scale", log, (on) => {
      this.log = on;
      this.draw();
    });
    this.picture = new Picture(card, title, {
      redraw: () => this.draw(),
      move: (how) => this.move(how),
      table: () => this.table(),
      controls: [...controls, logarithmic],
    });
  }

  update(lines, marks) {
    this.lines = lines.filter((line) => line.steps.length);
    this.marks = marks;
    this.draw();
    this.picture.fillTable();
  }

  shown() {
    return this.lines.filter((line) => !this.hidden.has(line.name));
  }

  draw() {
    const { picture } = this;
    if (!picture.width) return;
    picture.size(HEIGHT);
    picture.drawing.replaceChildren();
    this.drawLegend();
    const lines = this.shown();
    if (!lines.length) {
      picture.drawing.append(shape("text", { x: picture.width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "no values yet"));
      picture.describe(["No values yet.", ...this.faults()].join(" "));
      // What befell a run before its first values has a place, too.
      if (this.marks.length) {
        this.setSteps([]);
        this.drawSteps();
        this.drawMarks();
      }
      this.drawCursor();
      return;
    }
    this.setScales(lines);
    this.drawAxes();
    this.drawMarks();
    for (const line of lines) this.drawLine(line);
    picture.describe([...lines.map((line) => this.inWords(line)), ...this.faults()].join(" "));
    this.drawCursor();
  }

  setScales(lines) {
    const values = lines.flatMap((line) => line.values);
    let low = values.reduce((a, b) => Math.min(a, b), Infinity);
    let high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    const log = this.log && low > 0;
    if (log) [low, high] = [low * 0.97, high * 1.03];
    else if (this.zero) [low, high] = [Math.min(0, low), high * 1.06];
    else [low, high] = [low - (high - low) * 0.05, high + (high - low) * 0.05];
    if (low === high) [low, high] = log ? [low * 0.9, high * 1.1] : [low - 1, high + 1];
    this.setSteps(lines);
    this.y = scale(low, high, HEIGHT - MARGIN.bottom, MARGIN.top, log);
    this.isLog = log;
  }

  // From the first step to the last, of curves and of marks: a run fails in the step after its last values.
  setSteps(lines) {
    const steps = [...lines.flatMap((line) => [line.steps[0], line.steps[line.steps.length - 1]]), ...this.marks.map((mark) => mark.step)];
    const first = steps.reduce((a, b) => Math.min(a, b));
    const last = steps.reduce((a, b) => Math.max(a, b));
    this.x = scale(first, last === first ? first + 1 : last, MARGIN.left, this.picture.width - MARGIN.right);
  }

  drawAxes() {
    const { width, drawing } = this.picture;
    const rows = (this.isLog ? logTicks : ticks)(this.y.low, this.y.high, 5);
    // As many digits as it takes to tell them apart.
    const told = [3, 4, 5, 6].map((digits) => rows.map((value) => this.format(value, digits)));
    const labels = told.find((texts) => new Set(texts).size === rows.length) ?? told[0];
    const grid = shape("g", { class: "grid" });
    rows.forEach((value, place) => {
      const y = this.y(value);
      grid.append(shape("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }));
      grid.append(shape("text", { x: MARGIN.left - 7, y: y + 3.5, "text-anchor": "end" }, labels[place]));
    });
    drawing.append(grid);
    this.drawSteps();
  }

  drawSteps() {
    const { width, drawing } = this.picture;
    const grid = shape("g", { class: "grid" });
    for (const value of ticks(this.x.low, this.x.high, Math.max(2, width / 110)).filter(Number.isInteger)) {
      grid.append(this.picture.tickLabel(this.x(value), HEIGHT - 6, value.toLocaleString("en"), "middle"));
    }
    grid.append(shape("text", { x: MARGIN.left - 12, y: HEIGHT - 6, "text-anchor": "end" }, "step"));
    drawing.append(grid);
  }

  drawMarks() {
    const base = HEIGHT - MARGIN.bottom;
    for (const mark of this.marks) {
      const x = this.x(mark.step);
      const group = shape("g", { "data-mark": mark.name, "data-step": mark.step }, shape("title", {}, `${mark.name}, step ${mark.step}`));
      if (mark.level && !mark.low) group.append(shape("line", { class: `mark ${mark.level}`, x1: x, x2: x, y1: MARGIN.top, y2: base }));
      if (mark.level) group.append(shape("path", { class: `mark ${mark.level}`, d: `M${x} ${base + 1}l3.5 6h-7z` }));
      else group.append(shape("circle", { class: "mark small", cx: x, cy: base + 5, r: 2.2 }));
      this.picture.drawing.append(group);
    }
  }

  drawLine(line) {
    const kind = `curve ${strokeOf(line)}`;
    const smoothed = this.smooth && !line.sparse && line.steps.length > 30;
    const { drawing } = this.picture;
    drawing.append(shape("path", { class: `${kind}${smoothed ? " raw" : ""}`, d: this.path(line.steps, line.values) }));
    if (smoothed) drawing.append(shape("path", { class: kind, d: this.path(line.steps, running(line.values)) }));
    if (line.sparse || line.steps.length === 1) {
      line.steps.forEach((step, place) => {
        drawing.append(dot(line, this.x(step), this.y(line.values[place]), 3));
      });
    }
  }

  path(steps, values) {
    return steps.map((step, place) => `${place ? "L" : "M"}${this.x(step).toFixed(1)} ${this.y(values[place]).toFixed(1)}`).join("");
  }

  drawLegend() {
    const { legend } = this.picture;
    const wanted = this.lines.map((line) => `${line.name} ${strokeOf(line)} ${line.again}`).join("|");
    if (legend.dataset.of === wanted) return;
    legend.dataset.of = wanted;
    legend.replaceChildren(...(this.lines.length > 1 ? this.lines : []).map((line) => {
      const button = toggle(line.name, !this.hidden.has(line.name), (on) => {
        if (on) this.hidden.delete(line.name);
        else this.hidden.add(line.name);
        this.draw();
      });
      button.prepend(lineKey(line));
      return button;
    }));
  }

  inWords(line) {
    const last = line.values.length - 1;
    const low = line.values.reduce((a, b) => Math.min(a, b), Infinity);
    return `${line.name}: ${this.format(line.values[0])} at step ${line.steps[0]}, ${this.format(line.values[last])} at step ${line.steps[last]}, lowest ${this.format(low)}.`;
  }

  // What went wrong, in words.
  faults() {
    return this.marks.filter((mark) => mark.level === "bad").slice(-12).map((mark) => `${mark.name} at step ${mark.step}.`);
  }

  // Where the cursor can be: where a curve has a value, or an event has a line.
  places() {
    const steps = this.shown().flatMap((line) => line.steps);
    if (!steps.length) return steps;
    const marked = this.marks.filter((mark) => mark.level).map((mark) => mark.step);
    return [...new Set([...steps, ...marked])].sort((a, b) => a - b);
  }

  move({ x, by, leave }) {
    const places = this.places();
    if (leave || !places.length) this.at = null;
    else if (x !== undefined) {
      const step = this.x.low + ((x - MARGIN.left) / (this.picture.width - MARGIN.left - MARGIN.right)) * (this.x.high - this.x.low);
      this.at = nearest(places, step);
    } else {
      const now = this.at === null ? places.length : places.indexOf(this.at);
      const from = now < 0 ? places.length - 1 : now;
      this.at = places[Math.max(0, Math.min(places.length - 1, by === -Infinity ? 0 : from + by))];
    }
    this.drawCursor(by !== undefined);
  }

  drawCursor(spoken = false) {
    const { overlay, tip, readout, width } = this.picture;
    overlay.replaceChildren();
    tip.hidden = this.at === null || !this.shown().length;
    if (tip.hidden) return;
    const x = this.x(this.at);
    overlay.append(shape("line", { class: "cursor", x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
    const rows = [element("p", { class: "quiet" }, `step ${this.at.toLocaleString("en")}`)];
    const said = [`step ${this.at}`];
    for (const line of this.shown()) {
      const from = valueAt(line, this.at);
      if (from === null) continue;
      const value = `${this.format(line.values[from])}${line.steps[from] === this.at ? "" : ` (step ${line.steps[from].toLocaleString("en")})`}`;
      overlay.append(dot(line, this.x(line.steps[from]), this.y(line.values[from]), 4));
      rows.push(element("p", {}, lineKey(line), line.name, element("b", {}, value)));
      said.push(`${line.name} ${value}`);
    }
    const reach = (this.x.high - this.x.low) / 60;
    for (const mark of this.marks.filter((one) => Math.abs(one.step - this.at) <= reach).slice(-4)) {
      rows.push(element("p", { class: "quiet" }, `${mark.name} (step ${mark.step})`));
      said.push(`${mark.name} at step ${mark.step}`);
    }
    tip.replaceChildren(...rows);
    const wide = tip.offsetWidth;
    tip.style.left = `${Math.max(0, x + 14 + wide > width ? x - wide - 14 : x + 14)}px`;
    tip.style.top = `${MARGIN.top}px`;
    if (spoken) readout.textContent = said.join(", ");
  }

  table() {
    const lines = this.shown();
    const all = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
    const every = Math.ceil(all.length / MOST_ROWS);
    const maps = lines.map((line) => new Map(line.steps.map((step, place) => [step, line.values[place]])));
    const chosen = all.filter((step, place) => place % every === 0 || place === all.length - 1 || maps.some((map, which) => lines[which].sparse && map.has(step)));
    return {
      columns: ["step", ...lines.map((line) => line.name)],
      rows: chosen.map((step) => [step, ...maps.map((map) => (map.has(step) ? this.format(map.get(step)) : ""))]),
    };
  }
}

// Which value of a curve the cursor shows at a step; null for none. Of a curve with few points it is the last one before. Any
// other has a value at its own steps alone, or, where it was thinned, the nearest one that is left.
function valueAt(line, step) {
  const { steps, sparse } = line;
  const place = steps.indexOf(nearest(steps, step));
  if (sparse) {
    const from = steps[place] > step ? place - 1 : place;
    return from < 0 ? null : from;
  }
  if (steps[place] === step) return place;
  const last = steps.length - 1;
  const apart = Math.round((steps[last] - steps[0]) / Math.max(1, last));
  return step > steps[0] && step < steps[last] && apart > 1 && Math.abs(steps[place] - step) <= 2 * apart ? place : null;
}

function nearest(sorted, wanted) {
  let low = 0;
  let high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < wanted) low = middle;
    else high = middle;
  }
  return Math.abs(sorted[low] - wanted) <= Math.abs(sorted[high] - wanted) ? sorted[low] : sorted[high];
}

// A running mean that looks equally far ahead and back, so that it does not lag behind the curve; at the end, only back.
function running(values) {
  const reach = Math.max(2, Math.round(values.length / 60));
  const sums = [0];
  for (const value of values) sums.push(sums[sums.length - 1] + value);
  return values.map((_, place) => {
    const back = Math.min(reach, place);
    const ahead = Math.min(back, values.length - 1 - place);
    return (sums[place + ahead + 1] - sums[place - back]) / (back + ahead + 1);
  });
}
