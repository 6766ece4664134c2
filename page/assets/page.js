"use strict";
// Shows the page's data, section by section.

const SHOW = {
  words: showWords,
  picture: showPicture,
  table: showTable,
  figure: showFigure,
  verdicts: showVerdicts,
  timeline: showTimeLine,
};

{
  const page = JSON.parse(document.getElementById("data").textContent);
  document.getElementById("head").append(
    el("h1", {}, page.title),
    page.question ? el("p", { class: "note" }, page.question) : "",
    ...page.answer.map((words) => el("p", {}, words)));
  const main = document.getElementById("content");
  // After the first section, which is the answer's figure or verdicts.
  const shown = page.sections.map((section) => SHOW[section.kind](section));
  main.replaceChildren(...[shown[0], showWarnings(page.warnings), ...shown.slice(1)]
    .filter(Boolean));
  document.getElementById("foot").append(el("p", {}, page.made));
  fitCharts();
  addEventListener("resize", fitCharts);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    charts.forEach(({ plot }) => plot.redraw(false, true));
  });
}
