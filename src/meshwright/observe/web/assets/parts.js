// The parts of a step: their order, what they are called, and how each is drawn. A colour of its own (page.css) has each;
// waiting and what only plans tell apart have a texture besides, so that none depends on colours alone.

import { element, shape } from "./draw.js";

export const PARTS = {
  data: { label: "data", texture: null },
  forward: { label: "forward", texture: null },
  backward: { label: "backward", texture: null },
  recompute: { label: "recompute", texture: "bars" },
  compute: { label: "compute", texture: null },
  communication: { label: "exposed communication", short: "exposed", texture: "rise" },
  reduce: { label: "reduce", texture: null },
  bubble: { label: "bubble", texture: "fall" },
  idle: { label: "idle", texture: "dots" },
  optimizer: { label: "optimizer", texture: null },
  offload: { label: "offload", texture: "bars" },
  evaluate: { label: "evaluate", texture: null },
  checkpoint: { label: "checkpoint", texture: null },
  hooks: { label: "hooks", texture: null },
  other: { label: "other", texture: "bars" },
  unattributed: { label: "unattributed", texture: "dots" },
};

// What a profiled step tells beside its parts, since it lies within them or behind them.
export const BESIDE = {
  idle: { label: "idle, within the parts", short: "idle", part: "idle", texture: null },
  overlapped: { label: "overlapped communication, behind computing", short: "overlapped communication", part: "communication", texture: "bars" },
};

// Bright and dark strokes side by side, so that one of them is seen on any colour.
const TEXTURES = {
  rise: [45, [["line", "bright", 1.5], ["line", "dark", 4.5]]],
  fall: [-45, [["line", "bright", 1.5], ["line", "dark", 4.5]]],
  bars: [0, [["line", "bright", 1.5], ["line", "dark", 4.5]]],
  dots: [0, [["dot", "bright", 1.5], ["dot", "dark", 4.5]]],
};

function makeTextures() {
  const defined = Object.entries(TEXTURES).map(([name, [turn, strokes]]) => shape("pattern",
    { id: `texture-${name}`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: `rotate(${turn})` },
    ...strokes.map(([kind, tone, at]) => (kind === "line"
      ? shape("line", { class: `texture ${tone}`, x1: at, x2: at, y1: 0, y2: 6 })
      : shape("circle", { class: `texture ${tone}`, cx: at, cy: at, r: 0.9 })))));
  document.body.append(shape("svg", { class: "textures", width: 0, height: 0, "aria-hidden": "true" }, shape("defs", {}, ...defined)));
}

makeTextures();

// A part of a bar, with its name in it where there is room.
export function drawPart(part, title, { x, y, width, height }) {
  const { label, short = label, texture } = PARTS[part];
  const box = { x, y, width, height };
  const drawn = shape("g", { class: `part part-${part}` }, shape("title", {}, title), shape("rect", box));
  if (texture) drawn.append(shape("rect", { ...box, fill: `url(#texture-${texture})` }));
  if (height > 12 && width > 6.2 * short.length + 8) {
    drawn.append(shape("text", { x: x + width / 2, y: y + height / 2 + 3.5, "text-anchor": "middle", "aria-hidden": "true" }, short));
  }
  return drawn;
}

// A strip under a bar, of what lies beside its parts.
export function drawBeside(name, title, box) {
  const { part, texture } = BESIDE[name];
  return shape("g", { class: `part part-${part} beside`, "data-beside": name }, shape("title", {}, title), shape("rect", box), texture ? shape("rect", { ...box, fill: `url(#texture-${texture})` }) : null);
}

export function besideKey(name) {
  return key(BESIDE[name].part, BESIDE[name].texture, BESIDE[name].label, 6);
}

// What a part looks like and what it is called, for a legend.
export function partKey(part, label = PARTS[part].label) {
  return key(part, PARTS[part].texture, label, 12);
}

function key(part, texture, label, height) {
  const box = { x: 0, y: 0, width: 14, height, rx: 2 };
  const look = shape("svg", { class: `key-of-part part-${part}`, width: 14, height, "aria-hidden": "true" }, shape("rect", box));
  if (texture) look.append(shape("rect", { ...box, fill: `url(#texture-${texture})` }));
  return element("span", {}, look, label);
}
