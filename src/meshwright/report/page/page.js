"use strict";
(() => {
const D = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const PARTS = ["compute", "tp", "cp", "ep", "pp", "dp", "bubble", "optimizer", "other", "data"];
const NAMES = {compute: "computation", tp: "tensor", cp: "context", ep: "experts", pp: "messages", dp: "replicas", bubble: "bubble", optimizer: "optimizer", other: "host", data: "data"};
const STATES = ["parameters", "gradients", "optimizer", "master", "activations", "logits", "buffers"];
const COLOURS = ["#4c8dd6", "#e0873e", "#57a773", "#c8594f", "#8e73c4", "#a0785a", "#d17fb8", "#7f8994", "#b9b13b", "#45b0bf"];
const el = (tag, text, attributes = {}) => {
  const node = document.createElement(tag);
  if (text !== undefined && text !== null) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
};
const svgEl = (tag, attributes, title) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (title) node.append(Object.assign(document.createElementNS("http://www.w3.org/2000/svg", "title"), {textContent: title}));
  return node;
};
const text = (x, y, words, extra = {}) => Object.assign(svgEl("text", {x, y, ...extra}), {textContent: words});
const bytes = size => size >= 1e12 ? (size / 1e12).toFixed(2) + " TB" : size >= 1e9 ? (size / 1e9).toFixed(1) + " GB" : size >= 1e6 ? (size / 1e6).toFixed(1) + " MB" : (size / 1e3).toFixed(1) + " kB";
const seconds = s => s >= 172800 ? (s / 86400).toFixed(1) + " days" : s >= 7200 ? (s / 3600).toFixed(1) + " h" : s >= 100 ? s.toFixed(0) + " s" : s >= .1 ? s.toFixed(3) + " s" : (s * 1e3).toFixed(2) + " ms";
const count = n => Math.round(n).toLocaleString("en");

// ------------------------------------------------------------------ what if: each part scales with what it lies on
const SLIDERS = [
  {id: "device", label: "device speed", low: -2, high: 2, at: 0, show: x => "x " + (2 ** x).toFixed(2)},
  {id: "node", label: "links inside a node", low: -4, high: 3, at: 0, show: x => "x " + (2 ** x).toFixed(2)},
  {id: "network", label: "network between nodes", low: -4, high: 3, at: 0, show: x => "x " + (2 ** x).toFixed(2)},
  {id: "tokens", label: "tokens to train on", low: 8, high: 14, at: 12, show: x => (10 ** x).toPrecision(2)},
  {id: "price", label: "dollars a device hour", low: 0, high: 20, at: D.cluster.dollars || 0, show: x => x.toFixed(2)},
  {id: "mtbf", label: "hours between failures of a device", low: 2, high: 6, at: 4.7, show: x => count(10 ** x)},
  {id: "restart", label: "seconds of a restart", low: 0, high: 3600, at: 300, show: x => count(x)},
];
const value = {};
const link = (row, axis) => { const lane = row.lanes.find(l => l.axis === axis); return lane && lane.link !== "node" ? "network" : "node"; };
function what(row) {
  const device = 2 ** value.device, rate = {node: 2 ** value.node, network: 2 ** value.network};
  let busy = 0, old = 0, total = 0;
  for (const part of PARTS) {
    const s = row.parts[part] || 0;
    if (part === "bubble") continue;
    const now = part === "compute" || part === "optimizer" ? s / device : ["tp", "cp", "ep", "pp", "dp"].includes(part) ? s / rate[part === "dp" && !row.lanes.some(l => l.axis === "dp") ? link(row, "cp") : link(row, part)] : s;
    total += now;
    if (part === "compute" || part === "tp" || part === "cp" || part === "ep") { busy += now; old += s; }
  }
  return total + (row.parts.bubble || 0) * (old ? busy / old : 1);
}
function failures(step) {
  const M = 10 ** value.mtbf * 3600 / D.gpus, d = Math.max(D.model.checkpoint_bytes / D.gpus / D.cluster.host, 1e-3), R = value.restart;
  const q = d / (2 * M), daly = d >= 2 * M ? M : Math.sqrt(2 * d * M) * (1 + Math.sqrt(q) / 3 + q / 9) - d;
  const tau = Math.max(daly, step), exponent = (tau + d) / M;
  return {every: Math.max(1, Math.round(tau / step)), share: exponent + R / M > 700 ? 0 : tau / (M * Math.exp(R / M) * Math.expm1(exponent))};
}

// ------------------------------------------------------------------ state, table
const columns = [
  {key: "short", name: "layout", left: true, get: r => r.short},
  {key: "step", name: "step", get: r => r.now, show: r => seconds(r.now)},
  {key: "peak", name: "memory", get: r => r.peak, show: r => bytes(r.peak)},
  {key: "mfu", name: "MFU", get: r => -(r.mfu || 0), show: r => r.mfu === null ? "-" : (100 * r.mfu * r.seconds / r.now).toFixed(1) + " %"},
  {key: "dollars", name: "$ a step", get: r => value.price * r.now, show: r => value.price ? (value.price * D.gpus * r.now / 3600).toFixed(3) : "-"},
  ...["dp", "tp", "pp", "cp", "ep"].map(axis => ({key: axis, name: axis, get: r => r.mesh[axis], show: r => r.mesh[axis]})),
  {key: "zero", name: "ZeRO", get: r => r.zero, show: r => r.zero},
  {key: "micro", name: "micro", get: r => r.micro, show: r => r.micro},
];
let sortBy = "step", down = 1, chosen = D.rows[0];
const filter = {text: "", memory: Infinity, front: false, recompute: "", schedule: ""};

function shown() {
  const words = filter.text.toLowerCase().split(/\s+/).filter(Boolean);
  const column = columns.find(c => c.key === sortBy);
  return D.rows.filter(r => words.every(w => (r.short + " " + r.words.join(" ")).toLowerCase().includes(w)) && r.peak <= filter.memory && (!filter.front || r.front) && (!filter.recompute || r.recompute === filter.recompute) && (!filter.schedule || r.schedule === filter.schedule))
    .sort((a, b) => { const x = column.get(a), y = column.get(b); return down * (x < y ? -1 : x > y ? 1 : a.now - b.now); });
}
function drawHead() {
  const row = el("tr");
  for (const c of columns) {
    const th = el("th", null, c.left ? {class: "l", scope: "col"} : {scope: "col"});
    const button = el("button", c.name + (c.key === sortBy ? (down > 0 ? " ▲" : " ▼") : ""), {type: "button"});
    if (c.key === sortBy) th.setAttribute("aria-sort", down > 0 ? "ascending" : "descending");
    button.addEventListener("click", () => { down = sortBy === c.key ? -down : 1; sortBy = c.key; drawHead(); drawTable(); });
    th.append(button); row.append(th);
  }
  $("table").tHead.replaceChildren(row);
}
function drawTable() {
  const body = $("table").tBodies[0], had = document.activeElement && document.activeElement.closest && document.activeElement.closest("#table tbody");
  body.replaceChildren(...shown().map(r => {
    const tr = el("tr", null, {tabindex: r === chosen ? "0" : "-1", "aria-selected": String(r === chosen)});
    for (const c of columns) tr.append(el("td", c.left ? (r.front ? "◆ " : "") + r.short : c.show(r), c.left ? {class: "l"} : {}));
    tr.addEventListener("click", () => choose(r));
    tr.addEventListener("keydown", event => {
      const next = {ArrowDown: tr.nextSibling, ArrowUp: tr.previousSibling}[event.key];
      if (next) { next.focus(); event.preventDefault(); }
      if (event.key === "Enter" || event.key === " ") { choose(r); event.preventDefault(); }
    });
    return tr;
  }));
  if (!body.children.length) { const none = el("tr"); none.append(el("td", "no layout passes the filters", {class: "l", colspan: columns.length})); body.append(none); }
  if (body.querySelector("[tabindex='0']") === null && body.firstChild) body.firstChild.setAttribute("tabindex", "0");
  if (had) { const row = body.querySelector("[aria-selected=true]"); if (row) row.focus(); }
}
function choose(row) { chosen = row; drawTable(); drawChosen(); drawPareto(); }

// ------------------------------------------------------------------ the chosen layout
function stack(parts, total, limit) {
  const bar = el("div", null, {class: "bar"});
  for (const [name, size, colour] of parts) if (size > 0) bar.append(el("i", null, {style: `width:${100 * size / total}%;background:${colour}`, title: `${name} ${limit ? bytes(size) : seconds(size)}`}));
  if (limit) bar.append(el("b", null, {style: `left:${100 * limit / total}%`, title: "device limit " + bytes(limit)}));
  return bar;
}
function line(name, bar, figure) { const row = el("div", null, {class: "row"}); row.append(el("span", name), bar, el("span", figure)); return row; }
function legend(names, colours) { const out = el("div", null, {class: "legend"}); names.forEach((name, i) => { const item = el("span"); item.append(el("i", null, {style: `background:${colours[i]}`}), name); out.append(item); }); return out; }
function drawChosen() {
  const r = chosen;
  $("chosen").textContent = `${r.short}: ${seconds(r.seconds)} a step (within ${(100 * D.spread).toFixed(0)} %), ${bytes(r.reserved)} of ${bytes(D.cluster.room)}` + (r.mfu === null ? "" : `, MFU ${(100 * r.mfu).toFixed(1)} %`);
  $("words").textContent = r.words.join(" ");
  const sums = r.stages.map(s => STATES.reduce((sum, name) => sum + s.bytes[name], 0)), most = Math.max(D.cluster.room, ...sums) * 1.04;
  $("memory").replaceChildren(...r.stages.map((s, i) => line(s.name, stack(STATES.map((name, j) => [name, s.bytes[name], COLOURS[j]]), most, D.cluster.room), bytes(sums[i]))),
    legend([...STATES, "device limit"], [...COLOURS.slice(0, STATES.length), "var(--bad)"]));
  const used = PARTS.filter(p => Math.abs(r.parts[p] || 0) > r.seconds * 5e-4), top = Math.max(...used.map(p => r.parts[p]));
  $("parts").replaceChildren(...used.sort((a, b) => r.parts[b] - r.parts[a]).map(p => line(NAMES[p], stack([[NAMES[p], Math.max(r.parts[p], 0), COLOURS[PARTS.indexOf(p)]]], top), `${(100 * r.parts[p] / r.seconds).toFixed(1)} %`)));
}

// ------------------------------------------------------------------ Pareto plot
function drawPareto() {
  const W = 1000, H = 380, L = 64, B = 40, all = [...D.rows.map(r => [r.now, r.peak]), ...D.meshes.map(m => [m.seconds, m.bytes])];
  const span = i => { const v = all.map(p => Math.log(p[i])); const a = Math.min(...v), b = Math.max(...v), pad = (b - a || 1) * .05; return [a - pad, b + pad]; };
  const [x0, x1] = span(0), [y0, y1] = span(1), X = s => L + (Math.log(s) - x0) / (x1 - x0) * (W - L - 10), Y = m => H - B - (Math.log(m) - y0) / (y1 - y0) * (H - B - 10);
  const svg = svgEl("svg", {viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "step time against memory of every priced mesh"});
  for (let i = 0; i <= 4; i++) {
    const s = Math.exp(x0 + (x1 - x0) * i / 4), m = Math.exp(y0 + (y1 - y0) * i / 4);
    svg.append(svgEl("line", {x1: X(s), x2: X(s), y1: 10, y2: H - B, class: "axis"}), text(X(s), H - B + 18, seconds(s), {"text-anchor": i === 4 ? "end" : "middle", class: "hint"}));
    svg.append(svgEl("line", {x1: L, x2: W - 10, y1: Y(m), y2: Y(m), class: "axis"}), text(L - 6, Y(m) + 4, bytes(m), {"text-anchor": "end", class: "hint"}));
  }
  for (const m of D.meshes) svg.append(svgEl("circle", {cx: X(m.seconds), cy: Y(m.bytes), r: 2.5, class: "dot"}, `dp tp pp cp ep = ${m.mesh.join(" ")}: ${seconds(m.seconds)}, ${bytes(m.bytes)}`));
  const front = D.rows.filter(r => r.front).sort((a, b) => a.now - b.now);
  svg.append(svgEl("polyline", {points: front.map(r => `${X(r.now)},${Y(r.peak)}`).join(" "), class: "ring", "stroke-opacity": .4}));
  for (const r of D.rows) {
    const x = X(r.now), y = Y(r.peak), mark = r.front ? svgEl("path", {d: `M${x} ${y - 6}l6 6l-6 6l-6 -6z`, class: "front"}, `${r.short}: ${seconds(r.now)}, ${bytes(r.peak)}`) : svgEl("circle", {cx: x, cy: y, r: 4, class: "ring"}, `${r.short}: ${seconds(r.now)}, ${bytes(r.peak)}`);
    mark.style.cursor = "pointer"; mark.addEventListener("click", () => choose(r)); svg.append(mark);
    if (r === chosen) svg.append(svgEl("circle", {cx: x, cy: y, r: 10, class: "ring"}));
  }
  svg.append(text(W - 10, H - 4, "seconds a step (log)", {"text-anchor": "end", class: "hint"}), text(L + 6, 20, "bytes a rank (log)", {class: "hint"}));
  $("pareto").replaceChildren(svg);
}

// ------------------------------------------------------------------ mesh map
let axis = D.map.axes[D.map.axes.length - 1] || "dp", held = 0;
function drawMap() {
  $("axes").replaceChildren(el("span", "groups of"), ...D.map.axes.map(name => { const b = el("button", name, {type: "button", "aria-pressed": String(name === axis)}); b.addEventListener("click", () => { axis = name; drawMap(); }); return b; }));
  const same = (a, b) => D.map.axes.every(name => name === axis || a[name] === b[name]);
  const nodes = [];
  for (let start = 0; start < D.map.ranks.length; start += D.map.devices) {
    const node = el("div", null, {class: "node"}), cells = el("div", null, {class: "cells"});
    node.append(el("h3", `node ${start / D.map.devices}`), cells);
    D.map.ranks.slice(start, start + D.map.devices).forEach((at, i) => {
      const rank = start + i, key = D.map.axes.filter(n => n !== axis).reduce((hash, n) => hash * 31 + at[n], 7);
      const b = el("button", `${rank} ${D.map.axes.map(n => n[0] + at[n]).join("")}`, {type: "button", style: `background:hsl(${key * 67 % 360} 55% 72%)`, class: same(at, D.map.ranks[held]) ? "peer" : "", title: `rank ${rank}: ${D.map.axes.map(n => n + " " + at[n]).join(", ")}`});
      b.addEventListener("click", () => { held = rank; drawMap(); $("map").querySelectorAll("button")[rank].focus(); });
      cells.append(b);
    });
    nodes.push(node);
  }
  if (D.map.ranks.length < D.gpus) nodes.push(el("p", `and ${count(D.gpus - D.map.ranks.length)} devices more`, {class: "note"}));
  $("map").replaceChildren(...nodes);
}
function fill(id, names, rows) {
  const head = el("tr"); names.forEach((name, i) => head.append(el("th", name, {class: i === 0 || rows.some(r => typeof r[i] === "string" && r[i].length > 14) ? "l" : "", scope: "col"})));
  $(id).tHead.replaceChildren(head);
  $(id).tBodies[0].replaceChildren(...rows.map(cells => { const tr = el("tr"); cells.forEach((cell, i) => tr.append(el("td", cell, {class: head.children[i].className}))); return tr; }));
}

// ------------------------------------------------------------------ all of it
function update() {
  for (const r of D.rows) r.now = what(r);
  const best = D.rows.reduce((a, b) => a.now <= b.now ? a : b), steps = Math.ceil(10 ** value.tokens / D.model.tokens), lost = failures(best.now);
  const time = steps * best.now / (lost.share || 1e-9), dollars = time / 3600 * D.gpus * value.price;
  $("answer").textContent = `best then: ${best.short}, ${seconds(best.now)} a step. ${count(steps)} steps take ${seconds(time)}` + (value.price ? ` and ${count(dollars)} dollars` : "") + `; saving every ${count(lost.every)} steps, ${(100 * lost.share).toFixed(2)} % of the time is work that stays.`;
  drawTable(); drawPareto();
}
for (const s of SLIDERS) {
  value[s.id] = s.at;
  const label = el("label", s.label), out = el("output", s.show(s.at)), input = el("input", null, {type: "range", min: s.low, max: s.high, step: (s.high - s.low) / 200, value: s.at, id: "s-" + s.id, "aria-label": s.label});
  input.addEventListener("input", () => { value[s.id] = +input.value; out.textContent = s.show(+input.value); update(); });
  label.append(out, input); $("sliders").append(label);
}
const reset = el("button", "as priced", {type: "button", id: "reset"});
reset.addEventListener("click", () => { for (const s of SLIDERS) { value[s.id] = s.at; const input = $("s-" + s.id); input.value = s.at; input.previousSibling.textContent = s.show(s.at); } update(); });
$("sliders").append(reset);
function control(label, node, event, set) { const l = el("label", label); node.addEventListener(event, () => { set(node); drawTable(); }); l.append(node); $("filters").append(l); }
control("contains", el("input", null, {type: "search", id: "f-text", placeholder: "tp 8, ZeRO-3 ..."}), "input", n => filter.text = n.value.replace(/,/g, " "));
control("GB at most", el("input", null, {type: "number", min: 0, id: "f-memory"}), "input", n => filter.memory = n.value ? +n.value * 1e9 : Infinity);
const select = (values, id) => { const s = el("select", null, {id}); s.append(el("option", "any", {value: ""}), ...values.map(v => el("option", v, {value: v}))); return s; };
const distinct = name => [...new Set(D.rows.map(r => r[name]))].sort();
control("recompute", select(distinct("recompute"), "f-recompute"), "change", n => filter.recompute = n.value);
control("schedule", select(distinct("schedule"), "f-schedule"), "change", n => filter.schedule = n.value);
control("front only", el("input", null, {type: "checkbox", id: "f-front"}), "change", n => filter.front = n.checked);
$("theme").addEventListener("click", () => { const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches; root.dataset.theme = dark ? "light" : "dark"; });
$("lead").textContent = `${count(D.model.parameters)} parameters, ${count(D.model.tokens)} tokens a step, ${D.gpus} x ${D.cluster.device}. ${count(D.counts.legal)} of ${count(D.counts.enumerated)} layouts are legal, ${count(D.counts.priced)} were priced, ${count(D.counts.fitting)} fit.`;
$("advice").append(...D.advice.map(words => el("li", words.trim())));
$("collisions").append(...D.collisions.map(words => el("li", words)));
fill("links", ["axis", "degree", "link", "sent by a rank in a step", "per layer", "per step"], D.rows[0].lanes.map(l => [l.axis, l.degree, l.link + (l.neighbours_in_node > 1 && l.neighbours_in_node < l.degree ? `, ${l.neighbours_in_node} in a node` : ""), sent(l.axis), l.per_layer, l.per_step]));
function sent(name) { const groups = {dp: ["batch", "dense", "expert", "shard", "copy", "dp"], cp: ["cp"], tp: ["tp"], pp: ["pp"], ep: ["ep"]}[name] || []; return bytes(groups.reduce((sum, g) => sum + (D.map.sent[g] || 0), 0)); }
const rules = {};
for (const r of D.refused) { const key = r.rule.split(";")[0]; (rules[key] ||= {count: 0, meshes: 0, nearest: ""}); rules[key].count += r.count; rules[key].meshes++; rules[key].nearest ||= r.nearest[0] || ""; }
fill("refused", ["rule", "layouts", "meshes", "nearest, for one"], Object.entries(rules).sort((a, b) => b[1].count - a[1].count).map(([rule, r]) => [rule, count(r.count), r.meshes, r.nearest]));
for (const r of D.rows) r.now = r.seconds;
drawHead(); update(); drawChosen(); drawMap();
})();
