// Numbers as people read them; a unit stays on the line of its number.

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e7) return value.toExponential(Math.min(2, digits - 1));
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 6 });
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= size) return `${number(value / (letter === "k" ? 1e3 : size), 3)}\u00a0${letter}`;
  }
  return (Math.round(value) || 0).toLocaleString("en");
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (Math.abs(value) >= size) return `${number(value / size, 3)}\u00a0${unit}`;
  }
  return `${Math.round(value)}\u00a0B`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0\u00a0s";
  if (value < 1e-3) return `${number(value * 1e6, 3)}\u00a0µs`;
  if (value < 1) return `${number(value * 1e3, 3)}\u00a0ms`;
  if (value < 120) return `${number(value, 3)}\u00a0s`;
  const whole = Math.round(value);
  if (whole < 7200) return `${Math.floor(whole / 60)}\u00a0min\u00a0${whole % 60}\u00a0s`;
  if (whole < 172800) return `${Math.floor(whole / 3600)}\u00a0h\u00a0${Math.floor((whole % 3600) / 60)}\u00a0min`;
  return `${number(value / 86400, 3)}\u00a0days`;
}

export function percent(value, digits = 1) {
  return value === null || value === undefined ? "–" : `${(value * 100).toFixed(digits)}\u00a0%`;
}

export function signedPercent(value) {
  if (value === null || value === undefined) return "";
  return `${value < 0 ? "−" : "+"}${Math.abs(value * 100).toFixed(Math.abs(value) < 0.1 ? 1 : 0)}\u00a0%`;
}

// The time of day; of another day than today, the day with it.
export function clock(unix) {
  if (!unix) return "";
  const date = new Date(unix * 1000);
  const two = (part) => String(part).padStart(2, "0");
  const time = `${two(date.getHours())}:${two(date.getMinutes())}`;
  if (date.toDateString() === new Date().toDateString()) return `${time}:${two(date.getSeconds())}`;
  return `${two(date.getMonth() + 1)}-${two(date.getDate())} ${time}`;
}

export function byUnit(value, unit) {
  if (unit === "B") return bytes(value);
  if (unit === "s") return seconds(value);
  if (unit === "share") return percent(value);
  return count(value);
}
