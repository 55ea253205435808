// Creates elements and formats numbers. All text is in text nodes: names are untrusted.

const SVG = "http://www.w3.org/2000/svg";

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null));
  return node;
}

export const el = (tag, attributes = {}, ...children) =>
  filled(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS(SVG, tag), attributes, children);

export const find = (selector) => document.querySelector(selector);

export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Rebuild a part of the page only if its content has changed, which keeps selections.
export function redraw(node, shown, build) {
  const key = JSON.stringify(shown);
  if (node.dataset.shown === key) return;
  node.dataset.shown = key;
  node.replaceChildren(...build());
}

export const terms = (pairs) =>
  pairs
    .filter(([, value]) => value !== null)
    .map(([name, value, more]) => el("div", more ?? {}, el("dt", {}, name), el("dd", {}, value)));

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => whole.format(value);

// 812, 4.2k, 131k, 1.3M
/** Format bytes in decimal units; null is unknown. */
export function bytes(value) {
  if (value === null) return "–";
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
  }
  return `${value} B`;
}

export function short(value) {
  for (const [size, unit] of [[1e6, "M"], [1e3, "k"]]) {
    if (value >= size) {
      const scaled = value / size;
      return (scaled < 10 ? scaled.toFixed(1) : scaled.toFixed(0)) + unit;
    }
  }
  return value.toFixed(0);
}

export const rate = (value) =>
  value === 0 ? "0" : value < 10 ? value.toFixed(1) : whole.format(value);

export function share(part, all) {
  if (!all) return "–";
  const rounded = Math.round((100 * part) / all);
  return part > 0 && rounded === 0 ? "<1 %" : `${rounded} %`;
}

export const percent = (value) => `${(100 * value).toFixed(1)} %`;

export const ms = (value) =>
  value === null || value === undefined
    ? "–"
    : value < 9.95
      ? value.toFixed(1)
      : whole.format(value);

export function duration(seconds) {
  if (seconds < 10 && seconds % 1 >= 0.05) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${Math.round(seconds / 3600)} h`;
}

export const age = (seconds) => duration(Math.max(0, Math.round(seconds)));
