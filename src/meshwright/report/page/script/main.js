// All of it, once; then again whatever a slider changes.

function update() {
  for (const row of D.rows) row.now = stepThen(row);
  drawAnswer();
  drawTable();
  drawPareto();
}

function toggleTheme() {
  const root = document.documentElement, given = root.dataset.theme;
  const dark = given ? given === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
}

$("theme").addEventListener("click", toggleTheme);
addEventListener("resize", drawPareto);
addEventListener("beforeprint", drawPareto);
makeSliders(update);
makeFilters();
drawLead();
drawHead();
update();
drawChosen();
drawMap();
drawLinks();
drawAdvice();
drawRefused();
