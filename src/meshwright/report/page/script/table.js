// The ranked layouts: sorted by any column, filtered, walked by arrow keys.

const COLUMNS = [
  {key: "short", name: "layout", left: true, get: r => r.short, show: r => (r.front ? "◆ " : "") + r.short},
  {key: "step", name: "step", get: r => r.now, show: r => seconds(r.now)},
  {key: "peak", name: "memory", get: r => r.peak, show: r => bytes(r.peak)},
  {key: "mfu", name: "MFU", get: r => -(r.mfu || 0) * r.seconds / r.now,
    show: r => r.mfu === null ? "-" : percent(r.mfu * r.seconds / r.now)},
  {key: "dollars", name: "$ a step", get: r => r.now,
    show: r => value.price ? (value.price * D.gpus * r.now / 3600).toFixed(3) : "-"},
  ...["dp", "tp", "pp", "cp", "ep"].map(axis => ({key: axis, name: axis, get: r => r.mesh[axis]})),
  {key: "zero", name: "ZeRO", get: r => r.zero},
  {key: "micro", name: "micro", get: r => r.micro},
];
let sortBy = "step", direction = 1;

function passes(row) {
  const text = (row.short + " " + row.words.join(" ")).toLowerCase();
  return filter.text.toLowerCase().split(/\s+/).every(word => text.includes(word))
    && row.peak <= filter.memory && (!filter.front || row.front)
    && (!filter.recompute || row.recompute === filter.recompute)
    && (!filter.schedule || row.schedule === filter.schedule);
}

function shown() {
  const column = COLUMNS.find(each => each.key === sortBy);
  const order = (a, b) => {
    const x = column.get(a), y = column.get(b);
    return x === y ? a.now - b.now : direction * (x < y ? -1 : 1);
  };
  return D.rows.filter(passes).sort(order);
}

function drawHead() {
  const row = el("tr");
  for (const column of COLUMNS) {
    const sorted = column.key === sortBy, mark = sorted ? (direction > 0 ? " ▲" : " ▼") : "";
    const th = el("th", null, {scope: "col", ...(column.left ? {class: "l"} : {})});
    if (sorted) th.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
    const button = el("button", column.name + mark, {type: "button"});
    button.addEventListener("click", () => {
      direction = sorted ? -direction : 1;
      sortBy = column.key;
      drawHead();
      drawTable();
      $("table").tHead.querySelector(`[aria-sort] button`).focus();
    });
    th.append(button);
    row.append(th);
  }
  $("table").tHead.replaceChildren(row);
}

function rowOf(row) {
  const tr = el("tr", null, {tabindex: row === chosen ? "0" : "-1", "aria-selected": String(row === chosen)});
  for (const column of COLUMNS) {
    tr.append(el("td", (column.show || column.get)(row), column.left ? {class: "l"} : {}));
  }
  tr.addEventListener("click", () => choose(row));
  tr.addEventListener("keydown", event => {
    const rows = tr.parentNode.children;
    const next = {ArrowDown: tr.nextSibling, ArrowUp: tr.previousSibling, Home: rows[0], End: rows[rows.length - 1]};
    if (event.key in next) {
      event.preventDefault();
      if (next[event.key]) next[event.key].focus();
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      choose(row);
    }
  });
  return tr;
}

function drawTable() {
  const body = $("table").tBodies[0], focused = body.contains(document.activeElement);
  body.replaceChildren(...shown().map(rowOf));
  if (!body.children.length) {
    const none = el("tr");
    none.append(el("td", "no layout passes the filters", {class: "l", colspan: COLUMNS.length}));
    body.append(none);
  } else if (body.querySelector("[tabindex='0']") === null) {
    body.firstChild.setAttribute("tabindex", "0");
  }
  const selected = body.querySelector("[aria-selected=true]");
  if (focused && selected) selected.focus();
}

function makeFilters() {
  const control = (label, node, event, set) => {
    const holder = el("label", label);
    node.addEventListener(event, () => { set(node); drawTable(); });
    holder.append(node);
    $("filters").append(holder);
  };
  const select = (name, id) => {
    const node = el("select", null, {id}), kinds = [...new Set(D.rows.map(row => row[name]))].sort();
    node.append(el("option", "any", {value: ""}), ...kinds.map(kind => el("option", kind, {value: kind})));
    return node;
  };
  const search = el("input", null, {type: "search", id: "f-text", placeholder: "tp 8, ZeRO-3 ..."});
  control("contains", search, "input", n => filter.text = n.value.replace(/,/g, " ").trim());
  const most = el("input", null, {type: "number", min: 0, id: "f-memory"});
  control("GB at most", most, "input", n => filter.memory = n.value ? +n.value * 1e9 : Infinity);
  control("recompute", select("recompute", "f-recompute"), "change", n => filter.recompute = n.value);
  control("schedule", select("schedule", "f-schedule"), "change", n => filter.schedule = n.value);
  control("front only", el("input", null, {type: "checkbox", id: "f-front"}), "change", n => filter.front = n.checked);
}
