"use strict";
// Figures, drawn by uPlot: one size for all, light and dark, with a table for those who
// cannot see them.

const HEIGHT = 320;
const MOST_ROWS = 400;
const charts = [];

const colour = (place) => PALETTE.colours[place % PALETTE.colours.length];
const dash = (place) =>
  PALETTE.dashes[Math.floor(place / PALETTE.colours.length) % PALETTE.dashes.length];
const cssColour = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function axis(label, extra = {}) {
  return {
    label,
    stroke: () => cssColour("--text"),
    grid: { stroke: () => cssColour("--line"), width: 1 },
    ticks: { stroke: () => cssColour("--line"), width: 1 },
    values: (_, splits) => splits.map((value) => (value === null ? "" : number(value))),
    size: 64,
    ...extra,
  };
}

/**
 * A figure element: the chart, what it shows in words, and its data to be saved.
 *
 * `options` are uPlot's, less size. `rows` gives the columns and rows behind the chart,
 * `cells` those of its table where that is narrower.
 * Arrow keys move the cursor, and what stands there is read out.
 */
function figure(title, note, options, data, rows, cells = rows) {
  const holder = el("div", { class: "chart", tabindex: "0", role: "group",
    "aria-label": `${title}. Arrow keys move along the x axis.` });
  const spoken = el("p", { class: "note", "aria-live": "polite" });
  const plot = new uPlot({
    width: 600,
    height: HEIGHT,
    legend: { live: true },
    ...options,
  }, data, holder);
  plot.root.querySelectorAll("canvas").forEach((canvas) => {
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", title);
  });
  charts.push({ plot, holder });
  moveByKeys(holder, plot, options, spoken);
  const details = el("details", { ontoggle: () => {
    if (details.open && details.children.length === 1) {
      const [columns, all] = cells();
      const every = Math.ceil(all.length / MOST_ROWS);
      const shown = all.filter((_, index) => index % every === 0);
      if (every > 1) {
        details.append(el("p", { class: "note" }, `Every ${every}th row; the CSV has all.`));
      }
      details.append(tableOf(title, columns, shown));
    }
  } }, el("summary", {}, "As a table"));
  const tools = el("div", { class: "tools" },
    saveButton("Save as PNG", fileName(title, "png"), () => png(plot)),
    saveButton("Save as CSV", fileName(title, "csv"), () => csv(...rows())));
  const element = el("figure", {}, el("figcaption", {}, ...marked(title)),
    note ? el("p", { class: "note" }, ...marked(note)) : null, holder, spoken, tools, details);
  return { element, plot, holder };
}

function moveByKeys(holder, plot, options, spoken) {
  holder.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -50, PageDown: 50 };
    const last = plot.data[0].length - 1;
    let index = plot.cursor.idx ?? -1;
    if (event.key in steps) index += steps[event.key];
    else if (event.key === "Home") index = 0;
    else if (event.key === "End") index = last;
    else return;
    event.preventDefault();
    index = Math.max(0, Math.min(last, index));
    const left = plot.valToPos(plot.data[0][index], "x");
    plot.setCursor({ left, top: plot.bbox.height / 2 / devicePixelRatio });
    spoken.textContent = options.series.map((one, i) => {
      const value = i === 0 || !one.spoken ? plot.data[i][index] : one.spoken(index);
      return `${one.label ?? "x"} ${number(value)}`;
    }).join(", ");
    holder.dispatchEvent(new CustomEvent("at", { detail: index }));
  });
}

/** The chart as it is shown, on the page's background, with its legend's names. */
function png(plot) {
  const from = plot.ctx.canvas;
  const line = 20 * devicePixelRatio;
  const names = plot.series.slice(1).filter((one) => one.show);
  const canvas = el("canvas", { width: from.width,
    height: from.height + line * (names.length + 1) });
  const context = canvas.getContext("2d");
  context.fillStyle = cssColour("--back");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(from, 0, 0);
  context.font = `${14 * devicePixelRatio}px sans-serif`;
  names.forEach((one, index) => {
    const y = from.height + line * (index + 1);
    context.fillStyle = one.shade ?? cssColour("--text");
    context.fillRect(line, y - line / 2, line, line / 4);
    context.fillStyle = cssColour("--text");
    context.fillText(one.label, line * 2.5, y);
  });
  return new Promise((done) => { canvas.toBlob(done, "image/png"); });
}

/** Sizes all charts to the page, now and whenever it changes. */
function fitCharts() {
  for (const { plot, holder } of charts) {
    const width = Math.max(holder.clientWidth, 240);
    if (width !== plot.width) plot.setSize({ width, height: HEIGHT });
  }
}

function showFigure(section) {
  const series = [{ label: section.x_label }];
  const data = [section.x];
  const bands = [];
  const place = (line, index) => line.place ?? index;
  const shade = (line, index) => (line.muted ? PALETTE.muted : colour(place(line, index)));
  section.lines.forEach((line, index) => {
    series.push({ label: line.name, stroke: shade(line, index), shade: shade(line, index),
      dash: dash(place(line, index)), width: 2, spanGaps: true, points: { show: false } });
    data.push(line.y);
  });
  section.lines.forEach((line, index) => {
    if (!line.low) return;
    const edge = { stroke: "transparent", points: { show: false }, spanGaps: true };
    series.push({ ...edge, label: `${line.name}, upper edge`, class: "edge" },
      { ...edge, label: `${line.name}, lower edge`, class: "edge" });
    data.push(line.high, line.low);
    bands.push({ series: [data.length - 2, data.length - 1], fill: `${shade(line, index)}22` });
  });
  const columns = [section.x_label];
  section.lines.forEach((line) => {
    columns.push(line.name);
    if (line.low) columns.push(`${line.name}, low`, `${line.name}, high`);
  });
  const rows = () => [columns, section.x.map((x, i) => [x,
    ...section.lines.flatMap((line) => (line.low
      ? [line.y[i], line.low[i], line.high[i]] : [line.y[i]]))])];
  const options = {
    scales: { x: { time: false }, y: { range: (_, low, high) => [Math.min(0, low), high] } },
    axes: [axis(section.x_label, { size: 48 }), axis(section.y_label)],
    series,
    bands,
    cursor: { drag: { x: true, y: false } },
  };
  const range = (line, i) => (line.low && line.y[i] !== null
    ? `${number(line.y[i])} [${number(line.low[i])}, ${number(line.high[i])}]` : line.y[i]);
  const cells = () => [[section.x_label, ...section.lines.map((line) => line.name)],
    section.x.map((x, i) => [x, ...section.lines.map((line) => range(line, i))])];
  const made = figure(section.title, section.note, options, data, rows, cells);
  // The edges of bands are no lines of their own.
  made.holder.querySelectorAll(".u-series.edge").forEach((row) => row.remove());
  return el("section", {}, made.element);
}
