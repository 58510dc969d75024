// Collectives and events in words.

import { bytes, clock, number, seconds } from "./format.js";
import { element, tableOf } from "./draw.js";

const LEVELS = {
  failed: "bad", gave_up: "bad", hang: "bad", replicas_differ: "bad", out_of_memory: "bad", nonfinite: "bad", checkpoint_failed: "bad",
  spike: "warn", rollback: "warn", resumed: "warn", restarted: "warn", straggler: "warn", retuned: "warn", stopped: "warn",
  checkpoint_fallback: "warn", quarantined: "warn", drain: "warn", finished: "good", straggler_cleared: "good",
};

export function level(event) {
  return LEVELS[event.event] ?? "";
}

// Steps that nothing was learned from, then events that have a step, for the axes of charts.
export function marksOf(run) {
  const skipped = run.skipped.steps.map((step) => ({ step, name: "skipped", level: "warn", low: true }));
  const events = run.events.filter((event) => Number.isInteger(event.step)).map((event) => ({ step: event.step, name: inPlainWords(event.event), level: level(event) }));
  return [...skipped, ...events];
}

function inPlainWords(kind) {
  return kind.replaceAll("_", " ");
}

export class Collectives {
  constructor(card) {
    this.card = card;
    this.note = element("span", { class: "quiet" });
    this.body = element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Collectives" });
    card.append(element("div", { class: "head" }, element("h2", {}, "Collectives"), this.note), this.body);
  }

  update(run) {
    const found = run.collectives;
    this.card.hidden = !found || !Array.isArray(found.rows) || !found.rows.length;
    if (this.card.hidden) return;
    const text = JSON.stringify(found);
    if (text === this.text) return;
    this.text = text;
    this.note.textContent = `of profiled step ${found.step}`;
    const rows = [...found.rows].sort((a, b) => (b.seconds ?? 0) - (a.seconds ?? 0));
    const speed = (value) => (typeof value === "number" ? number(value, 3) : "");
    this.body.replaceChildren(tableOf({
      columns: ["group", "operation", "message", "count", "data", "time", "algorithm GB/s", "bus GB/s"],
      words: [1, 2],
      optional: [2, 3, 6],
      rows: rows.map((row) => [row.group, row.operation, row.size, row.count, bytes(row.bytes), seconds(row.seconds), speed(row.algorithm_gb_s), speed(row.bus_gb_s)]),
    }));
  }
}

export class Events {
  constructor(card) {
    this.card = card;
    this.note = element("span", { class: "quiet" });
    this.list = element("ol", { class: "events", reversed: true });
    this.body = element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Events" }, this.list);
    card.append(element("div", { class: "head" }, element("h2", {}, "Events"), this.note), this.body);
  }

  update(run) {
    this.card.hidden = !run.events.length;
    const last = run.events[run.events.length - 1];
    const text = `${run.name} ${run.events.length} ${run.earlier_events} ${last?.time}`;
    if (text === this.text) return;
    this.text = text;
    this.note.textContent = run.earlier_events ? `the newest ${run.events.length}; ${run.earlier_events} before them are in events.jsonl` : "the newest first";
    this.list.replaceChildren(...[...run.events].reverse().map(item));
  }
}

function item(event) {
  return element("li", { class: level(event) },
    element("time", {}, clock(event.time)),
    element("span", { class: "at" }, Number.isInteger(event.step) ? `step ${event.step}` : ""),
    element("span", { class: "kind" }, inPlainWords(event.event)),
    element(event.words.includes("\n") ? "pre" : "span", { class: "text" }, event.words));
}
