// The chosen layout: its words, its memory by stage against the device, its step by cause.

function bar(parts, whole, limit) {
  const node = el("div", null, {class: "bar"});
  for (const [size, colour, title] of parts) {
    if (size > 0) node.append(el("i", null, {style: `width:${100 * size / whole}%;background:${colour}`, title}));
  }
  if (limit) node.append(el("b", null, {style: `left:${100 * limit / whole}%`, title: "device limit " + bytes(limit)}));
  return node;
}

function barLine(name, drawn, figure) {
  const row = el("div", null, {class: "row"});
  row.append(el("span", name), drawn, el("span", figure));
  return row;
}

function legend(names, colours) {
  const out = el("div", null, {class: "legend"});
  names.forEach((name, i) => {
    const item = el("span");
    item.append(el("i", null, {style: `background:${colours[i]}`}), name);
    out.append(item);
  });
  return out;
}

function drawMemory(row) {
  const room = D.cluster.room, sum = stage => STATES.reduce((total, name) => total + stage.bytes[name], 0);
  const most = Math.max(room, ...row.stages.map(sum)) * 1.04;
  const lines = row.stages.map(stage => {
    const parts = STATES.map((name, i) => [stage.bytes[name], COLOURS[i], `${name} ${bytes(stage.bytes[name])}`]);
    return barLine(stage.name, bar(parts, most, room), bytes(sum(stage)));
  });
  $("memory").replaceChildren(...lines, legend([...STATES, "device limit"], [...COLOURS.slice(0, 7), "var(--bad)"]));
}

function drawParts(row) {
  const size = part => row.parts[part] || 0;
  const used = PARTS.filter(part => Math.abs(size(part)) > row.seconds * 5e-4).sort((a, b) => size(b) - size(a));
  const most = Math.max(...used.map(size));
  $("parts").replaceChildren(...used.map(part => {
    const drawn = [[Math.max(size(part), 0), COLOURS[PARTS.indexOf(part)], `${NAMES[part]} ${seconds(size(part))}`]];
    return barLine(NAMES[part], bar(drawn, most), percent(size(part) / row.seconds));
  }));
}

function drawChosen() {
  const row = chosen, mfu = row.mfu === null ? "" : `, MFU ${percent(row.mfu)}`;
  const trained = row.trained ? `; as meshwright train runs it ${bytes(row.trained)} at most` : "";
  $("chosen").textContent = `${row.short}: ${seconds(row.seconds)} a step (within ${percent(D.spread, 0)}), ` +
    `${bytes(row.reserved)} of ${bytes(D.cluster.room)} reserved${mfu}${trained}`;
  $("words").textContent = row.words.join(" ");
  drawMemory(row);
  drawParts(row);
}

function choose(row) {
  chosen = row;
  drawTable();
  drawChosen();
  drawPareto();
}
