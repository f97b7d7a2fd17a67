// The data of the page, what its names mean, and what the reader has chosen.

const D = JSON.parse($("data").textContent);
const NAMES = D.parts;
const PARTS = Object.keys(NAMES);
const STATES = ["parameters", "gradients", "optimizer", "master", "activations", "logits", "buffers"];
const COLOURS = [
  "#4c8dd6", "#e0873e", "#57a773", "#c8594f", "#8e73c4", "#a0785a", "#d17fb8", "#7f8994", "#b9b13b", "#45b0bf",
];

const value = {};  // of every slider
const filter = {text: "", memory: Infinity, front: false, recompute: "", schedule: ""};
let chosen = D.rows[0];
