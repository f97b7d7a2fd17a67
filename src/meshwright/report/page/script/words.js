// Elements and figures, as every part of the page makes them.

const $ = id => document.getElementById(id);

const el = (tag, text, attributes = {}) => {
  const node = document.createElement(tag);
  if (text !== undefined && text !== null) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
};

const SVG = "http://www.w3.org/2000/svg";
const svgEl = (tag, attributes, title) => {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (title) node.append(Object.assign(document.createElementNS(SVG, "title"), {textContent: title}));
  return node;
};
const svgText = (x, y, words, attributes = {}) =>
  Object.assign(svgEl("text", {x, y, ...attributes}), {textContent: words});

const scaled = (number, units) => {
  const [unit, scale, digits] = units.find(([, scale]) => number >= scale) || units[units.length - 1];
  return (number / scale).toFixed(digits) + unit;
};
const BYTES = [[" TB", 1e12, 2], [" GB", 1e9, 1], [" MB", 1e6, 1], [" kB", 1e3, 1]];
const COUNTS = [[" trillion", 1e12, 2], [" billion", 1e9, 2], [" million", 1e6, 2]];
const bytes = size => scaled(size, BYTES);
const seconds = s => {
  if (s >= 172800) return (s / 86400).toFixed(1) + " days";
  if (s >= 7200) return (s / 3600).toFixed(1) + " h";
  return s >= .1 ? s.toFixed(s >= 100 ? 0 : 3) + " s" : (s * 1e3).toFixed(2) + " ms";
};
const count = n => Math.round(n).toLocaleString("en");
const large = n => n < 1e6 ? count(n) : scaled(n, COUNTS);
const percent = (share, digits = 1) => (100 * share).toFixed(digits) + " %";
