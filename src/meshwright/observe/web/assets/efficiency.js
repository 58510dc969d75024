// Computation efficiency: of the run and of each rank, on a scale with the goal that it should reach.

import { percent, seconds } from "./format.js";
import { Picture, element, moved, scale, shape } from "./draw.js";

const MOST_BARS = 64;
const LEFT = 58;
const TOP = 16;

export class EfficiencyCard {
  constructor(card) {
    this.card = card;
    this.at = null;
    this.bars = [];
    this.picture = new Picture(card, "Computation efficiency", {
      redraw: () => this.draw(),
      move: (how) => this.move(how),
      table: () => this.table(),
    });
    this.words = element("p", { class: "quiet" });
    this.picture.holder.before(this.words);
  }

  update(run) {
    this.run = run;
    this.card.hidden = !run.efficiency;
    if (this.card.hidden) return;
    const { goal, share } = run.efficiency;
    this.goal = goal;
    this.ranks = run.ranks.filter((rank) => rank.efficiency);
    this.bars = [{ label: "run", name: "the run", share }, ...barsOf(this.ranks)];
    const steps = [...new Set(this.ranks.map((rank) => rank.profiled?.step))];
    this.picture.note.textContent = steps.length === 1 ? `profiled step ${steps[0]}` : "newest profiled steps";
    this.words.textContent = `Computing as a share of computing and exposed communication; a run should reach ${percent(goal, 0)}. Bubble and idle time do not count.`;
    this.draw();
    this.picture.fillTable();
  }

  reaches(share) {
    return share >= this.goal;
  }

  draw() {
    const { picture, bars } = this;
    if (!picture.width || this.card.hidden || !this.run) return;
    const tall = bars.length > 20 ? 7 : bars.length > 9 ? 12 : 16;
    const gap = tall > 10 ? 5 : 2;
    const apart = 6;
    const bottom = TOP + bars.length * (tall + gap) + apart;
    picture.size(bottom + 16);
    const said = (bar) => `${percent(bar.share)}${this.reaches(bar.share) ? "" : " below"}`;
    this.right = Math.ceil(picture.widest([...new Set(bars.map(said))], "strong")) + 12;
    const x = scale(0, 1, LEFT, picture.width - this.right);
    picture.drawing.replaceChildren();
    const labelled = this.labelled();
    this.rows = bars.map((bar, place) => {
      const y = TOP + place * (tall + gap) + (place ? apart : 0);
      const below = !this.reaches(bar.share);
      const box = { x: LEFT, y, width: Math.max(1, x(bar.share) - LEFT), height: tall, rx: 2 };
      const drawn = shape("g", { "data-bar": bar.label, class: below ? "share below" : "share" },
        shape("title", {}, this.inWords(bar)),
        shape("rect", { class: "lane", x: LEFT, y, width: x(1) - LEFT, height: tall, rx: 2 }),
        shape("rect", box),
        below ? shape("rect", { ...box, fill: "url(#texture-fall)" }) : null);
      if (tall > 10 || labelled.has(place)) {
        const [middle, kind] = [y + tall / 2 + 4, place ? null : "strong"];
        drawn.append(
          shape("text", { x: LEFT - 8, y: middle, "text-anchor": "end", class: kind }, bar.label),
          shape("text", { x: x(1) + 8, y: middle, class: kind }, said(bar)),
        );
      }
      picture.drawing.append(drawn);
      return { y, tall: tall + gap };
    });
    const at = x(this.goal);
    picture.drawing.append(
      shape("line", { class: "goal", x1: at, x2: at, y1: TOP - 4, y2: bottom }),
      shape("text", { class: "strong", x: at, y: 9, "text-anchor": "middle" }, `goal ${percent(this.goal, 0)}`),
      ...[0, 0.5, 1].map((value) => shape("text", { x: x(value), y: bottom + 12, "text-anchor": value ? "middle" : "start" }, percent(value, 0))),
    );
    picture.describe(this.description());
    this.drawCursor();
  }

  // Of many bars, those that have their labels: the run, those below the goal, every fourth; no neighbour of another.
  labelled() {
    const places = this.bars.map((_, place) => place);
    const chosen = new Set([0]);
    for (const place of [...places.filter((one) => !this.reaches(this.bars[one].share)), ...places.filter((one) => one % 4 === 1)]) {
      if (place === 1 || (!chosen.has(place - 1) && !chosen.has(place + 1))) chosen.add(place);
    }
    return chosen;
  }

  description() {
    const [run, ...others] = this.bars;
    const low = others.filter((bar) => !this.reaches(bar.share)).map((bar) => bar.label.replace("rank ", ""));
    const named = low.length ? `Below it: rank${low.length > 1 ? "s" : ""} ${low.slice(0, 20).join(", ")}${low.length > 20 ? " and others" : ""}.` : "No rank is below it.";
    return `The run: ${percent(run.share)}, ${this.reaches(run.share) ? "reaches" : "is below"} the goal of ${percent(this.goal, 0)}. ${named}`;
  }

  inWords(bar) {
    return `${bar.name}: ${percent(bar.share)} computing, ${this.reaches(bar.share) ? "reaches" : "below"} the goal of ${percent(this.goal, 0)}`;
  }

  move({ y, by, leave }) {
    if (leave || !this.bars.length) this.at = null;
    else if (y !== undefined) {
      const under = this.rows.findIndex((row) => y < row.y + row.tall);
      this.at = under < 0 ? this.bars.length - 1 : under;
    } else this.at = moved(this.at, by, this.bars.length);
    this.drawCursor();
  }

  drawCursor() {
    const { overlay, readout, width } = this.picture;
    overlay.replaceChildren();
    const bar = this.at === null ? null : this.bars[this.at];
    const row = this.rows?.[this.at];
    readout.textContent = bar && row ? this.inWords(bar) : "";
    if (bar && row) overlay.append(shape("rect", { class: "current", x: LEFT - 2, y: row.y - 1, width: width - LEFT - this.right + 4, height: row.tall - 1, rx: 3 }));
  }

  table() {
    const judged = (share) => (this.reaches(share) ? "reached" : "below");
    return {
      columns: ["", "efficiency", `goal ${percent(this.goal, 0)}`, "computing", "exposed communication"],
      optional: [3, 4],
      rows: [
        ["run", percent(this.run.efficiency.share), judged(this.run.efficiency.share), "", ""],
        ...this.ranks.map(({ rank, efficiency: { compute, exposed, share } }) => [`rank\u00a0${rank}`, percent(share), judged(share), seconds(compute), seconds(exposed)]),
      ],
    };
  }
}

// A bar for each rank, or, where there are too many, for the lowest of as many neighbours as it takes.
function barsOf(ranks) {
  const size = Math.ceil(ranks.length / MOST_BARS) || 1;
  const bars = [];
  for (let first = 0; first < ranks.length; first += size) {
    const group = ranks.slice(first, first + size);
    const lowest = group.reduce((one, other) => (other.efficiency.share < one.efficiency.share ? other : one));
    const [from, to] = [group[0].rank, group[group.length - 1].rank];
    const label = from === to ? `rank ${from}` : `${from}–${to}`;
    bars.push({ label, name: from === to ? label : `rank ${lowest.rank}, the lowest of ${from} to ${to}`, share: lowest.efficiency.share });
  }
  return bars;
}
