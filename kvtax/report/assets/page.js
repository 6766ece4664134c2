"use strict";
// Shows the page's data, section by section.

const SHOW = {
  words: showWords,
  table: showTable,
  figure: showFigure,
  verdicts: showVerdicts,
  timeline: showTimeLine,
  bars: showBars,
  group: showGroup,
};

{
  const page = JSON.parse(document.getElementById("data").textContent);
  document.getElementById("head").append(
    el("h1", {}, ...marked(page.title)),
    page.question ? el("p", { class: "note" }, ...marked(page.question)) : "",
    ...paragraphs(page.answer));
  const main = document.getElementById("content");
  const shown = page.sections.map((section) => SHOW[section.kind](section));
  // On the first screen: verdicts beside their figure, a table over its
  // figure, or the first section.
  const kinds = page.sections.slice(0, 2).map((section) => section.kind).join();
  const isBeside = kinds === "verdicts,figure";
  const first = el("div", { class: isBeside ? "first two" : "first" },
    ...shown.splice(0, /^(verdicts,figure|table,figure)$/.test(kinds) ? 2 : 1));
  main.replaceChildren(...[first, showWarnings(page.warnings), ...shown].filter(Boolean));
  document.getElementById("foot").append(el("p", {}, ...marked(page.made)));
  fitCharts();
  addEventListener("resize", fitCharts);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    charts.forEach(({ plot }) => plot.redraw(false, true));
  });
}
