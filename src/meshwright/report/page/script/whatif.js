// What if: each part of a step scales with what it lies on; overlaps stay as they are.

const factor = x => "x " + (2 ** x).toFixed(2);
const SLIDERS = [
  {id: "device", label: "device speed", low: -2, high: 2, at: 0, show: factor},
  {id: "node", label: "links inside a node", low: -4, high: 3, at: 0, show: factor},
  {id: "network", label: "network between nodes", low: -4, high: 3, at: 0, show: factor},
  {id: "tokens", label: "tokens to train on", low: 8, high: 14, at: 12, show: x => large(10 ** x)},
  {id: "price", label: "dollars a device hour", low: 0, high: 20, at: D.cluster.dollars || 0, show: x => x.toFixed(2)},
  {id: "mtbf", label: "device hours a failure", low: 2, high: 6, at: 4.7, show: x => count(10 ** x)},
  {id: "restart", label: "seconds of a restart", low: 0, high: 3600, at: 300, show: count},
];

// The link that an axis lies on; replicas without a dp axis are those of cp.
const linkOf = (row, axis) => {
  const lane = row.lanes.find(each => each.axis === axis);
  return lane && lane.link !== "node" ? "network" : "node";
};
const carrier = (row, part) => part === "dp" && !row.lanes.some(lane => lane.axis === "dp") ? "cp" : part;

// Seconds of a step of `row` as the sliders stand. A bubble stays the share of the work that it was.
function stepThen(row) {
  const device = 2 ** value.device, link = {node: 2 ** value.node, network: 2 ** value.network};
  const slowed = {};
  for (const part of PARTS) {
    const s = row.parts[part] || 0;
    if (part === "compute" || part === "optimizer") slowed[part] = s / device;
    else if (["tp", "cp", "ep", "pp", "dp"].includes(part)) slowed[part] = s / link[linkOf(row, carrier(row, part))];
    else slowed[part] = s;
  }
  const work = parts => ["compute", "tp", "cp", "ep"].reduce((sum, part) => sum + (parts[part] || 0), 0);
  slowed.bubble *= work(row.parts) ? work(slowed) / work(row.parts) : 1;
  return PARTS.reduce((sum, part) => sum + slowed[part], 0);
}

// Steps between checkpoints and the share of time that is work that stays: Daly 2006, equations 37 and 20.
function failures(row) {
  const step = row.now, M = 10 ** value.mtbf * 3600 / D.gpus, R = value.restart;
  const d = Math.max(row.written / D.cluster.host, 1e-3);
  const q = d / (2 * M), daly = d >= 2 * M ? M : Math.sqrt(2 * d * M) * (1 + Math.sqrt(q) / 3 + q / 9) - d;
  const tau = Math.max(daly, step), exponent = (tau + d) / M;
  const share = exponent + R / M > 700 ? 0 : tau / (M * Math.exp(R / M) * Math.expm1(exponent));
  return {every: Math.max(1, Math.round(tau / step)), share};
}

function drawAnswer() {
  const best = D.rows.reduce((a, b) => a.now <= b.now ? a : b), lost = failures(best);
  const steps = Math.ceil(10 ** value.tokens / D.model.tokens), time = steps * best.now / (lost.share || 1e-9);
  const dollars = value.price ? ` and ${count(time / 3600 * D.gpus * value.price)} dollars` : "";
  $("answer").textContent = `best then: ${best.short}, ${seconds(best.now)} a step. ${count(steps)} steps take ` +
    `${lost.share ? seconds(time) + dollars : "for ever"}; saving every ${count(lost.every)} steps, ` +
    `${percent(lost.share, 2)} of the time is work that stays.`;
}

function makeSliders(changed) {
  for (const s of SLIDERS) {
    value[s.id] = s.at;
    const label = el("label"), out = el("output", s.show(s.at), {for: "s-" + s.id}), name = el("span", s.label);
    const range = {min: s.low, max: s.high, step: (s.high - s.low) / 200, value: s.at};
    const input = el("input", null, {type: "range", id: "s-" + s.id, "aria-label": s.label, ...range});
    const set = to => {
      value[s.id] = to;
      out.textContent = s.show(to);
      input.setAttribute("aria-valuetext", s.show(to));
    };
    input.addEventListener("input", () => { set(+input.value); changed(); });
    s.reset = () => { input.value = s.at; set(s.at); };
    s.reset();
    label.append(name, out, input);
    $("sliders").append(label);
  }
  const reset = el("button", "as priced", {type: "button", id: "reset"});
  reset.addEventListener("click", () => { SLIDERS.forEach(s => s.reset()); changed(); });
  $("sliders").append(reset);
}
