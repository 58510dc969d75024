// The page: takes the runs as they come and has every part show them.

import { count, number, percent, seconds } from "./format.js";
import { element, lookOf } from "./draw.js";
import { embedded, follow } from "./data.js";
import { LineChart } from "./line_chart.js";
import { Breakdown } from "./breakdown.js";
import { EfficiencyCard } from "./efficiency.js";
import { Mesh } from "./mesh.js";
import { Pipeline } from "./pipeline.js";
import { Memory } from "./memory.js";
import { Collectives, Events, marksOf } from "./tables.js";
import { Summary } from "./summary.js";

const share = (value) => percent(value);
const OTHERS = {
  grad_norm: ["gradient norm", number], lr: ["learning rate", number], step_s: ["step time", seconds], mfu: ["MFU", share],
  tflops_per_device: ["TFLOP/s per device", number], tokens_per_s_per_device: ["tokens/s per device", count],
  loss_max: ["largest loss of a replica", number], pipeline_idle: ["pipeline idle", share], loss_scale: ["loss scale", number],
  spike_score: ["spike score", number], sent_mib: ["MiB of gradients sent by a rank", number],
};

class Page {
  constructor() {
    const card = (id) => document.getElementById(id);
    this.chosen = 0;
    this.runs = null;
    this.arrived = 0;
    this.summary = new Summary((place) => {
      this.chosen = place;
      this.draw();
    });
    this.loss = new LineChart(card("loss"), "Loss", { smooth: true });
    this.throughput = new LineChart(card("throughput"), "Throughput, tokens/s", { format: count, zero: true, smooth: true });
    this.select = element("select", { "aria-label": "Which curve" });
    this.select.addEventListener("change", () => this.drawOther());
    this.other = new LineChart(card("other"), "Other curves", { controls: [this.select] });
    this.parts = [
      new Mesh(card("mesh")), new Breakdown(card("breakdown")), new EfficiencyCard(card("efficiency")), new Pipeline(card("pipeline")), new Memory(card("memory")),
      new Collectives(card("collectives")), new Events(card("events")),
    ];
  }

  take(data) {
    this.runs = data.runs;
    this.arrived = performance.now();
    // Several messages may come before the browser draws.
    if (!this.waiting) this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      this.draw();
    });
  }

  draw() {
    const { runs } = this;
    if (!runs?.length) return;
    this.chosen = Math.min(this.chosen, runs.length - 1);
    const run = runs[this.chosen];
    this.summary.update(runs, this.chosen);
    this.loss.update(this.lines([["loss", "loss"], ["eval_loss", "held-out"]]), marksOf(run));
    this.throughput.update(this.lines([["tokens_per_s", "tokens/s"]]), marksOf(run));
    this.drawOther();
    for (const part of this.parts) part.update(run);
    this.tick();
  }

  // The curves of all runs, the run's colour or, of a single run, a colour for each.
  lines(series) {
    const several = this.runs.length > 1;
    return this.runs.flatMap((run, place) => series.filter(([name]) => run.curves[name]).map(([name, title], which) => ({
      name: several ? `${run.name}${which ? `, ${title}` : ""}` : title,
      steps: run.curves[name][0],
      values: run.curves[name][1],
      ...lookOf(several ? place : which),
      sparse: name === "eval_loss",
      dashed: several && which > 0,
    })));
  }

  drawOther() {
    const known = Object.keys(OTHERS).filter((name) => this.runs.some((run) => run.curves[name]));
    const text = known.join("|");
    if (text !== this.known) {
      this.known = text;
      const before = this.select.value;
      this.select.replaceChildren(...known.map((name) => element("option", { value: name }, OTHERS[name][0])));
      if (known.includes(before)) this.select.value = before;
    }
    document.getElementById("other").hidden = !known.length;
    if (!known.length) return;
    const [title, format] = OTHERS[this.select.value];
    this.other.format = format;
    this.other.update(this.lines([[this.select.value, title]]), marksOf(this.runs[this.chosen]));
  }

  // Time passes also while nothing comes.
  tick() {
    const link = document.getElementById("link");
    const run = this.runs?.[this.chosen];
    if (this.fixed) return;
    if (!run) {
      link.textContent = this.linked === false ? "the server does not answer" : "";
      return;
    }
    const age = (run.age_s ?? 0) + (performance.now() - this.arrived) / 1000;
    link.textContent = this.linked === false ? "the server does not answer" : run.state === "running" && run.step ? age < 1.5 ? "last step just now" : `last step ${seconds(Math.floor(age))} ago` : "";
  }
}

function setUpTheme() {
  const button = document.getElementById("theme");
  const root = document.documentElement;
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const show = () => {
    button.textContent = dark() ? "light" : "dark";
    button.setAttribute("aria-label", `Switch to ${dark() ? "light" : "dark"} colours`);
  };
  try {
    const kept = localStorage.getItem("meshwright-theme");
    if (kept === "light" || kept === "dark") root.dataset.theme = kept;
  } catch {
    // A browser that keeps nothing shows what the system prefers.
  }
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try {
      localStorage.setItem("meshwright-theme", root.dataset.theme);
    } catch {
      // As above.
    }
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  show();
}

setUpTheme();
const page = new Page();
const written = embedded();
if (written) {
  page.fixed = true;
  page.take(written);
} else {
  // Of a long run the server reads for some seconds, in which empty pictures would look like a run without steps.
  const main = document.getElementById("main");
  main.setAttribute("aria-busy", "true");
  document.getElementById("state").textContent = "reading what the run has recorded";
  follow((data) => {
    main.removeAttribute("aria-busy");
    page.take(data);
  }, (linked) => {
    page.linked = linked;
    page.tick();
  });
  setInterval(() => page.tick(), 1000);
}
