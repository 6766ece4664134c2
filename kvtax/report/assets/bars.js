"use strict";
// Bars whose parts add up to a whole, and sections behind one title.

/** A bar for each whole, with its words under it. */
function showBars(section) {
  const key = el("p", { class: "note key" }, ...section.parts.flatMap((name, place) => [
    el("span", { class: "swatch", style: `background: ${barColour(place)}` }), name, " "]));
  return el("section", {}, section.title ? el("h2", {}, ...marked(section.title)) : null,
    key, ...section.bars.map((bar) => showBar(section, bar)));
}

const barColour = (place) => PALETTE.colours[place % PALETTE.colours.length];

function showBar(section, bar) {
  const whole = bar.values.reduce((sum, value) => sum + (value ?? 0), 0);
  const words = section.parts.map((name, place) =>
    `${name} ${number(bar.values[place])} (${percent(bar.values[place], whole)})`).join(", ");
  const parts = section.parts.map((name, place) => el("span", {
    style: `width: ${100 * (bar.values[place] ?? 0) / (whole || 1)}%; background: ${barColour(place)}`,
    title: `${name}: ${number(bar.values[place])} ${section.unit}`,
  }));
  return el("div", { class: "bar-card" },
    el("h3", {}, ...breakable(marked(bar.name))),
    el("div", { class: "bar", role: "img", "aria-label": `${bar.name}: ${words}` }, ...parts),
    el("p", { class: "note" }, `${number(whole)} ${section.unit}: ${words}. ${bar.note}`),
    ...paragraphs(bar.paragraphs));
}

const percent = (value, whole) => `${(100 * (value ?? 0) / (whole || 1)).toFixed(1)} %`;

/** Sections that are drawn when their title is opened: a page may hold many. */
function showGroup(section) {
  const details = el("details", { ontoggle: () => {
    if (details.open && details.children.length === 1) {
      details.append(...section.sections.map((one) => SHOW[one.kind](one)));
      fitCharts();
    }
  } }, el("summary", {}, ...marked(section.title)));
  return el("section", {}, details);
}
