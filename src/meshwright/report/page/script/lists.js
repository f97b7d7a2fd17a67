// Tables and lists that never change.

const GROUPS = {
  dp: ["batch", "dense", "expert", "shard", "copy", "dp"], cp: ["cp"], tp: ["tp"], pp: ["pp"], ep: ["ep"],
};

function fill(id, names, rows) {
  const wide = i => i === 0 || rows.some(row => typeof row[i] === "string" && row[i].length > 14);
  const kinds = names.map((_, i) => wide(i) ? "l" : ""), head = el("tr");
  head.append(...names.map((name, i) => el("th", name, {class: kinds[i], scope: "col"})));
  $(id).tHead.replaceChildren(head);
  $(id).tBodies[0].replaceChildren(...rows.map(cells => {
    const tr = el("tr");
    tr.append(...cells.map((cell, i) => el("td", cell, {class: kinds[i]})));
    return tr;
  }));
}

function drawLead() {
  const c = D.counts;
  $("lead").textContent = `${large(D.model.parameters)} parameters, ${large(D.model.tokens)} tokens a step, ` +
    `${count(D.gpus)} x ${D.cluster.device}. ${count(c.legal)} of ${count(c.enumerated)} layouts are legal, ` +
    `${count(c.priced)} were priced, ${count(c.fitting)} fit.`;
}

function drawLinks() {
  const sent = axis => bytes((GROUPS[axis] || []).reduce((sum, group) => sum + (D.map.sent[group] || 0), 0));
  const near = lane => lane.neighbours_in_node > 1 && lane.neighbours_in_node < lane.degree;
  const rows = D.rows[0].lanes.map(lane => [
    lane.axis, lane.degree, lane.link + (near(lane) ? `, ${lane.neighbours_in_node} in a node` : ""),
    sent(lane.axis), lane.per_layer, lane.per_step,
  ]);
  $("links").hidden = !rows.length;  // of one rank
  fill("links", ["axis", "degree", "link", "sent by a rank in a step", "per layer", "per step"], rows);
  $("collisions").append(...D.collisions.map(words => el("li", words)));
}

const degreesOf = mesh =>
  Object.entries(mesh).filter(([, size]) => size > 1).map(pair => pair.join(" ")).join(" x ") || "one rank";

function drawRefused() {
  const rules = {};
  for (const refusal of D.refused) {
    const rule = rules[refusal.rule.split(";")[0]] ||= {count: 0, meshes: 0, nearest: ""};
    rule.count += refusal.count;
    rule.meshes += 1;
    rule.nearest ||= refusal.nearest.length ? `on ${degreesOf(refusal.mesh)}: ${refusal.nearest[0]}` : "";
  }
  const rows = Object.entries(rules).sort((a, b) => b[1].count - a[1].count);
  const cells = rows.map(([rule, r]) => [rule, count(r.count), r.meshes, r.nearest]);
  fill("refused", ["rule", "layouts", "meshes", "nearest, for one"], cells);
}

function drawAdvice() {
  const words = D.advice.map(each => each.trim()).filter(each => !D.collisions.includes(each));
  $("advice").append(...words.map(each => el("li", each)));
}
