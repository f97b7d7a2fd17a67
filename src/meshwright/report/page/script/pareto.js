// Time against reserved memory, which is what must fit, both logarithmic; drawn as wide as there is room, so that its
// words keep their size.

const EDGE = {left: 62, right: 14, top: 26, bottom: 40};

// At least 3 % on either side: figures that differ by a byte stand at one place.
function scale(values, low, high) {
  const logs = values.map(Math.log), a = Math.min(...logs), b = Math.max(...logs), pad = Math.max((b - a) * .06, .03);
  const at = v => low + (Math.log(v) - a + pad) / (b - a + 2 * pad) * (high - low);
  return {at, tick: share => Math.exp(a - pad + (b - a + 2 * pad) * share)};
}

function drawPareto() {
  const W = Math.max($("pareto").clientWidth, 280), H = Math.min(380, Math.max(260, W * .6));
  const all = [...D.rows.map(r => [r.now, r.reserved]), ...D.meshes.map(m => [m.seconds, m.bytes])];
  const x = scale(all.map(p => p[0]), EDGE.left, W - EDGE.right);
  const y = scale(all.map(p => p[1]), H - EDGE.bottom, EDGE.top);
  const label = "step time against memory of the ranked layouts and of every priced mesh";
  const svg = svgEl("svg", {viewBox: `0 0 ${W} ${H}`, width: W, height: H, role: "img", "aria-label": label});
  drawAxes(svg, W, H, x, y);
  for (const m of D.meshes) {
    const title = `dp tp pp cp ep = ${m.mesh.join(" ")}: ${seconds(m.seconds)}, ${bytes(m.bytes)}`;
    svg.append(svgEl("circle", {cx: x.at(m.seconds), cy: y.at(m.bytes), r: 2.5, class: "dot"}, title));
  }
  const front = D.rows.filter(r => r.front).sort((a, b) => a.now - b.now);
  const points = front.map(r => `${x.at(r.now)},${y.at(r.reserved)}`).join(" ");
  svg.append(svgEl("polyline", {points, class: "ring", "stroke-opacity": .4}));
  for (const row of D.rows) drawMark(svg, row, x.at(row.now), y.at(row.reserved));
  $("pareto").replaceChildren(svg);
}

function drawAxes(svg, W, H, x, y) {
  const bottom = H - EDGE.bottom, right = W - EDGE.right, ticks = W < 520 ? 2 : 4;
  for (let i = 0; i <= ticks; i++) {
    const s = x.tick(i / ticks), at = x.at(s), anchor = i === ticks ? "end" : "middle";
    svg.append(svgEl("line", {x1: at, x2: at, y1: EDGE.top, y2: bottom, class: "axis"}));
    svg.append(svgText(at, bottom + 16, seconds(s), {"text-anchor": anchor, class: "hint"}));
  }
  for (let i = 0; i <= 4; i++) {
    const m = y.tick(i / 4), at = y.at(m);
    svg.append(svgEl("line", {x1: EDGE.left, x2: right, y1: at, y2: at, class: "axis"}));
    svg.append(svgText(EDGE.left - 6, at + 4, bytes(m), {"text-anchor": "end", class: "hint"}));
  }
  svg.append(svgText(right, H - 6, "a step (log)", {"text-anchor": "end", class: "hint"}));
  svg.append(svgText(0, 12, "memory that a rank reserves (log)", {class: "hint"}));
}

function drawMark(svg, row, x, y) {
  const title = `${row.short}: ${seconds(row.now)}, ${bytes(row.reserved)}`;
  const mark = row.front
    ? svgEl("path", {d: `M${x} ${y - 6}l6 6l-6 6l-6 -6z`, class: "mark front"}, title)
    : svgEl("circle", {cx: x, cy: y, r: 4, class: "mark ring"}, title);
  mark.addEventListener("click", () => choose(row));
  svg.append(mark);
  if (row === chosen) svg.append(svgEl("circle", {cx: x, cy: y, r: 10, class: "ring"}));
}
