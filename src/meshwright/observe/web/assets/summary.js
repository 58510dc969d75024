// What is seen at a glance: the name, how the run stands, how far it is, and its figures.

import { bytes, count, number, percent, seconds, signedPercent } from "./format.js";
import { element, lineKey, lookOf } from "./draw.js";

const STATES = { waiting: "waiting for the first step", silent: "no sign of life" };

export class Summary {
  constructor(choose) {
    this.choose = choose;
    for (const id of ["name", "state", "about", "runs", "progress", "figures"]) this[id] = document.getElementById(id);
    this.progress.querySelector(".bar").append(element("div"));
  }

  update(runs, chosen) {
    const run = runs[chosen];
    this.name.textContent = run.name;
    this.state.className = `state ${run.state}`;
    const said = `${STATES[run.state] ?? run.state}${run.reason && run.state !== "waiting" ? `: ${run.reason}` : ""}`;
    // A screen reader speaks this when it changes, and only then.
    if (this.state.textContent !== said) this.state.textContent = said;
    const about = [element("code", {}, run.strategy || "no strategy yet"), ` · ${run.world} rank${run.world === 1 ? "" : "s"}`];
    if (run.chip || run.device) about.push(` · ${run.chip ?? run.device}`);
    this.about.replaceChildren(...about);
    document.title = `${run.step}${run.steps ? `/${run.steps}` : ""} · ${run.name} · meshwright`;
    this.drawRuns(runs, chosen);
    this.drawProgress(run);
    this.drawFigures(run);
  }

  drawRuns(runs, chosen) {
    this.runs.hidden = runs.length < 2;
    const text = runs.map((run) => run.name).join("|") + chosen;
    if (text === this.text) return;
    this.text = text;
    const inside = this.runs.contains(document.activeElement);
    this.runs.replaceChildren(...runs.map((run, place) => {
      const button = element("button", { type: "button", "aria-pressed": String(place === chosen) }, lineKey(lookOf(place)), run.name);
      button.addEventListener("click", () => this.choose(place));
      return button;
    }));
    if (inside) this.runs.children[chosen].focus();
  }

  drawProgress(run) {
    this.progress.hidden = !run.steps;
    if (!run.steps) return;
    const share = Math.min(1, run.step / run.steps);
    this.progress.querySelector(".bar div").style.width = `${share * 100}%`;
    const left = run.state === "running" && run.step_s && share < 1 ? `, about ${seconds(Math.ceil((run.steps - run.step) * run.step_s))} left` : "";
    this.progress.querySelector("p").textContent = `step ${run.step.toLocaleString("en")} of ${run.steps.toLocaleString("en")}${left}`;
  }

  drawFigures(run) {
    const { latest, goodput, speeds, efficiency, skipped } = run;
    const [time, , peak] = run.comparison.figures;
    const figure = (label, value, below, meter = null) => element("div", { class: "figure" },
      element("div", { class: "label" }, label),
      element("div", { class: "value" }, value),
      meter,
      element("div", { class: "quiet" }, below || "\u00a0"));
    const over = (kind) => (speeds.steps ? `${kind} of ${speeds.steps} step${speeds.steps > 1 ? "s" : ""}` : "");
    const joined = (...words) => words.filter(Boolean).join("; ");
    const expected = (pair, text) => (pair.predicted === null ? "" : `planned ${text(pair.predicted)} ${signedPercent(pair.error) && `(${signedPercent(pair.error)})`}`);
    const flops = speeds.tflops_per_device;
    const speed = speeds.mfu !== null ? ["MFU", percent(speeds.mfu)] : flops !== null ? ["TFLOP/s per device", number(flops, 3)] : null;
    const made = [
      figure("loss", number(latest.loss), latest.eval_loss === null ? "" : `held-out ${number(latest.eval_loss)}`),
      figure("tokens/s", count(speeds.tokens_per_s), joined(run.world > 1 && speeds.tokens_per_s !== null && `${count(speeds.tokens_per_s / run.world)} per rank`, over("mean"))),
      speed && figure(speed[0], speed[1], joined(speed[0] === "MFU" && flops !== null && `${number(flops, 3)} TFLOP/s per device`, over("mean"))),
      figure("a step takes", seconds(run.step_s), joined(expected(time, seconds), over("median"))),
      efficiency && figure("computation efficiency", percent(efficiency.share), `goal ${percent(efficiency.goal, 0)}; else exposed communication`, meter(efficiency)),
      figure("peak memory", bytes(peak.measured), expected(peak, bytes)),
      goodput && figure("goodput", percent(goodput.share), `of ${seconds(goodput.wall_s)}; ${goodput.rest.slice(0, 2).map((one) => `${one.name} ${percent(one.share)}`).join(", ")}`),
      skipped.count + skipped.nonfinite > 0 && figure("skipped steps", count(skipped.count), skipped.nonfinite ? `NaN or infinity in ${count(skipped.nonfinite)} step${skipped.nonfinite > 1 ? "s" : ""}` : "nothing was learned from them"),
    ];
    this.figures.replaceChildren(...made.filter(Boolean));
  }
}

// A share on a scale with the mark it should reach; the figure and the words beside it say the same.
function meter({ share, goal }) {
  const made = element("div", { class: share < goal ? "meter below" : "meter", "aria-hidden": "true" }, element("div", { class: "filled" }), element("div", { class: "goal" }));
  made.querySelector(".filled").style.width = `${share * 100}%`;
  made.querySelector(".goal").style.left = `${goal * 100}%`;
  return made;
}
