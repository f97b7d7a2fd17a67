// The ranks of the first nodes, coloured by group; the group of the chosen rank is framed.

let axis = D.map.axes[D.map.axes.length - 1] || "dp", held = 0;

function drawMap() {
  const axes = D.map.axes.map(name => {
    const button = el("button", name, {type: "button", "aria-pressed": String(name === axis)});
    button.addEventListener("click", () => { axis = name; drawMap(); focusOn($("axes"), D.map.axes.indexOf(name)); });
    return button;
  });
  $("axes").replaceChildren(...(axes.length ? [el("span", "groups of"), ...axes] : []));
  const nodes = [];
  for (let first = 0; first < D.map.ranks.length; first += D.map.devices) nodes.push(nodeOf(first));
  const left = D.gpus - D.map.ranks.length;
  if (left > 0) nodes.push(el("p", `and ${count(left)} devices more`, {class: "note"}));
  $("map").replaceChildren(...nodes);
}

function nodeOf(first) {
  const node = el("div", null, {class: "node"}), cells = el("div", null, {class: "cells"});
  const ranks = D.map.ranks.slice(first, first + D.map.devices);
  node.append(el("h3", `node ${first / D.map.devices}`), cells);
  cells.append(...ranks.map((at, i) => cellOf(at, first + i)));
  return node;
}

function cellOf(at, rank) {
  const others = D.map.axes.filter(name => name !== axis), mine = D.map.ranks[held];
  const group = others.reduce((hash, name) => hash * 31 + at[name], 7) * 67 % 360;
  const place = D.map.axes.map(name => `${name} ${at[name]}`).join(", ");
  const button = el("button", null, {
    type: "button", title: `rank ${rank}: ${place}`, "aria-label": `rank ${rank}: ${place}`,
    style: `background:hsl(${group} 55% 72%)`, class: others.every(name => at[name] === mine[name]) ? "peer" : "",
  });
  button.append(el("strong", rank), el("span", D.map.axes.map(name => name[0] + at[name]).join(" ")));
  button.addEventListener("click", () => { held = rank; drawMap(); focusOn($("map"), rank); });
  return button;
}

const focusOn = (holder, index) => holder.querySelectorAll("button")[index].focus();
