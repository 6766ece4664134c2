"use strict";
// A server's steps over time: what they cost, what was in them, and who waited.

// Columns of times in the table of requests.
const MOST_TIMES = 8;
const MOST_REQUESTS = 10;
const RIGHT_AXIS = 48;
const LABEL = 24;

function showTimeLine(section) {
  return el("section", {}, el("h2", {}, section.title), ...timeLineParts(section));
}

function timeLineParts(section) {
  const window_ = el("div", { "aria-live": "polite" });
  const step = el("div", { "aria-live": "polite" });
  const sync = uPlot.sync(section.title);
  const state = { from: section.t_s[0] ?? 0, to: end(section) };
  const cost = costFigure(section, sync);
  const gauges = gaugeFigure(section, sync);
  const inputs = windowInputs(section, state, () => update());
  const update = () => {
    window_.replaceChildren(...windowParts(section, state.from, state.to));
    inputs.show();
  };
  for (const { plot, holder } of [cost, gauges]) {
    plot.hooks.setSelect = [(chart) => {
      const { left, width } = chart.select;
      if (width < 2) return;
      state.from = chart.posToVal(left, "x");
      state.to = chart.posToVal(left + width, "x");
      update();
    }];
    const at = (index) => step.replaceChildren(...stepParts(section, index));
    plot.over.addEventListener("click", () => {
      if (plot.cursor.idx !== null && plot.cursor.idx !== undefined) at(plot.cursor.idx);
    });
    holder.addEventListener("at", (event) => at(event.detail));
  }
  update();
  const note = section.note ? [el("p", { class: "note" }, section.note)] : [];
  return [...note, cost.element, step, gauges.element, inputs.element, window_];
}

const interval = (section) => (section.t_s.length > 1 ? section.t_s[1] - section.t_s[0] : 0);
const end = (section) => (section.t_s.at(-1) ?? 0) + interval(section);

// What dwarfs the connector's part of a step, and is hidden at first.
const LARGE = ["model", "other"];

/** Parts on top of each other, and the slowest step of each interval above them. */
function costFigure(section, sync) {
  const names = Object.keys(section.parts);
  // The highest is drawn first, and those below it over it.
  const drawn = [...names].reverse();
  const known = names.some((name) => ![...LARGE, "scheduler"].includes(name));
  const isShown = Object.fromEntries(
    names.map((name) => [name, !(known && LARGE.includes(name))]));
  const series = [{ label: "s since the first step" }];
  for (const name of drawn) {
    const index = names.indexOf(name);
    series.push({ label: name, fill: colour(index), stroke: colour(index),
      shade: colour(index), width: 1, points: { show: false }, show: isShown[name],
      spoken: (i) => section.parts[name][i],
      value: (_, __, ___, i) => (i === null ? DASH : number(section.parts[name][i])) });
  }
  series.push({ label: "slowest step", stroke: () => cssColour("--text"), width: 1,
    points: { show: true, size: 3 }, value: (_, us) => number(us) });
  const columns = ["s", "steps", ...names, "slowest step us", "slowest step_id"];
  const rows = () => [columns, section.t_s.map((t, i) => [t, section.steps[i],
    ...names.map((name) => section.parts[name][i]), section.slowest_us[i],
    section.slowest_step[i]])];
  const restack = (plot, number_) => {
    const name = drawn[number_ - 1];
    if (name === undefined || isShown[name] === plot.series[number_].show) return;
    isShown[name] = plot.series[number_].show;
    plot.setData(stacked(section, names, drawn, isShown));
  };
  const options = {
    scales: { x: { time: false }, y: { range: (_, __, high) => [0, high] } },
    axes: [axis("s since the first step", { size: 48 }), axis("µs per step")],
    // As wide as the other figure's right axis, so that moments lie below each other.
    padding: [null, RIGHT_AXIS + LABEL, null, null],
    series,
    hooks: { setSeries: [restack] },
    cursor: { sync: { key: sync.key }, drag: { x: true, y: false, setScale: false } },
  };
  return figure("What a step takes, by part",
    "Means over each interval, stacked; the line is the slowest step in it, both without "
    + "the parts that are hidden. Click a name to hide or show it; drag to choose a window; "
    + "click for the slowest step there.", options,
    stacked(section, names, drawn, isShown), rows);
}

/** The chart's data: the tops of the parts that are shown, as one lies on the other. */
function stacked(section, names, drawn, isShown) {
  const tops = {};
  let below = section.t_s.map(() => 0);
  for (const name of names.filter((one) => isShown[one])) {
    below = section.parts[name].map((us, i) => (us === null ? null : us + below[i]));
    tops[name] = below;
  }
  const hidden = names.filter((one) => !isShown[one]);
  const slowest = section.slowest_us.map((us, i) => (us === null ? null
    : hidden.reduce((left, name) => left - partOfSlowest(section, names, name, i), us)));
  return [section.t_s, ...drawn.map((name) => tops[name] ?? section.parts[name]), slowest];
}

/** What a part took in the slowest step; the last of the connector's is a sum. */
function partOfSlowest(section, names, name, i) {
  if (name in section.slowest_parts) return section.slowest_parts[name][i] ?? 0;
  return Object.entries(section.slowest_parts)
    .filter(([part]) => !names.includes(part))
    .reduce((sum, [, us]) => sum + (us[i] ?? 0), 0);
}

function gaugeFigure(section, sync) {
  const series = [{ label: "s since the first step" }];
  const data = [section.t_s];
  section.gauges.forEach((gauge, index) => {
    series.push({ label: gauge.name, stroke: colour(index), shade: colour(index),
      dash: dash(index), width: 2, scale: gauge.of_requests ? "requests" : "blocks",
      points: { show: false }, value: (_, value) => number(value) });
    data.push(gauge.values);
  });
  const fromZero = { range: (_, __, high) => [0, high || 1] };
  const options = {
    scales: { x: { time: false }, blocks: fromZero, requests: fromZero },
    axes: [axis("s since the first step", { size: 48 }), axis("blocks", { scale: "blocks" }),
      axis("requests", { scale: "requests", side: 1, size: RIGHT_AXIS,
        labelSize: LABEL, grid: { show: false } })],
    series,
    cursor: { sync: { key: sync.key }, drag: { x: true, y: false, setScale: false } },
  };
  const columns = ["s", ...section.gauges.map((gauge) => gauge.name)];
  const rows = () => [columns, section.t_s.map((t, i) => [t,
    ...section.gauges.map((gauge) => gauge.values[i])])];
  return figure("What was cached, and what ran", "", options, data, rows);
}

/** The window in numbers: the same as dragging, for a keyboard. */
function windowInputs(section, state, changed) {
  const input = (name, label) => {
    const box = el("input", { type: "number", step: "any", min: "0", onchange: () => {
      const value = Number(box.value);
      if (box.value !== "" && Number.isFinite(value)) state[name] = value;
      changed();
    } });
    return { box, label: el("label", {}, `${label} `, box) };
  };
  const from = input("from", "From, s");
  const to = input("to", "to, s");
  const whole = el("button", { type: "button", onclick: () => {
    state.from = section.t_s[0] ?? 0;
    state.to = end(section);
    changed();
  } }, "Whole");
  const element = el("div", { class: "tools", role: "group", "aria-label": "Window" },
    from.label, to.label, whole);
  const show = () => {
    from.box.value = String(Math.round(state.from * 1e6) / 1e6);
    to.box.value = String(Math.round(state.to * 1e6) / 1e6);
  };
  return { element, show };
}

/** Requests that were there at some moment of the window: their row numbers. */
function requestsIn(requests, from, to) {
  const found = [];
  for (let i = 0; i < requests.ids.length; i += 1) {
    if (requests.arrival_s[i] <= to && requests.end_s[i] >= from) found.push(i);
  }
  return found;
}

function windowParts(section, from, to) {
  const width = interval(section);
  const inside = section.t_s.map((t, i) => [t, i])
    .filter(([t, i]) => t + width > from && t < to && section.steps[i] > 0)
    .map(([, i]) => i);
  const steps = inside.reduce((sum, i) => sum + section.steps[i], 0);
  const rows = Object.entries(section.parts).map(([name, us]) => [name,
    steps ? inside.reduce((sum, i) => sum + us[i] * section.steps[i], 0) / steps : null]);
  const span = `${number(from)} to ${number(to)} s`;
  const parts = [el("h3", {}, `From ${span}: ${number(steps)} steps`),
    tableOf(`Parts of a step from ${span}`, ["part", "µs per step"], rows)];
  if (section.requests) parts.push(...requestParts(section.requests, from, to, span));
  return parts;
}

function requestParts(requests, from, to, span) {
  const names = Object.keys(requests.columns);
  const shown = shownColumns(requests.columns);
  const found = requestsIn(requests, from, to);
  const waits = requests.columns[names[0]];
  found.sort((a, b) => waits[b] - waits[a]);
  const row = (i, of) => [requests.ids[i], ...of.map((name) => requests.columns[name][i])];
  const hidden = names.length - shown.length;
  const left = requests.total - requests.ids.length;
  const heading = el("h3", { "data-requests": String(found.length) },
    `${number(found.length)} requests from ${span}, by what they waited for`);
  const note = `Longest ${names[0]} first${found.length > MOST_REQUESTS
    ? `, ${MOST_REQUESTS} of them; the CSV has all` : ""}. Requests of one step wait for the `
    + "same work together, so waits of two requests must not be added up."
    + (hidden ? ` ${hidden} columns that are zero, or smaller, are in the CSV alone.` : "")
    + (left > 0 ? ` ${number(left)} requests that waited less are not on this page.` : "");
  return [heading, el("p", { class: "note" }, note),
    tableOf(`Requests from ${span}`, ["request", ...shown],
      found.slice(0, MOST_REQUESTS).map((i) => row(i, shown))),
    el("div", { class: "tools" }, saveButton("Save these requests as CSV", "requests.csv",
      () => csv(["request", ...names], found.map((i) => row(i, names)))))];
}

/** The columns that are not all zero, of numbers the largest, in their order. */
function shownColumns(columns) {
  const size = Object.fromEntries(Object.entries(columns).map(([name, values]) =>
    [name, values.reduce((sum, value) =>
      sum + (typeof value === "number" ? Math.abs(value) : 0), 0)]));
  const kept = Object.keys(columns).filter((name, i) =>
    i === 0 || size[name] > 0 || columns[name].some((value) => typeof value === "string"));
  const times = kept.filter((name) => name.endsWith(" ms"))
    .sort((a, b) => size[b] - size[a]).slice(0, MOST_TIMES);
  return kept.filter((name, i) => i === 0 || !name.endsWith(" ms") || times.includes(name));
}

function stepParts(section, index) {
  const id = section.slowest_step[index];
  if (id === null || id === undefined) return [el("p", {}, "No step in this interval.")];
  const rows = Object.entries(section.slowest_parts)
    .map(([name, us]) => [name, us[index]])
    .filter(([, us]) => us !== null && us >= 0.05)
    .sort((a, b) => b[1] - a[1]);
  const words = `Step ${id}, the slowest of ${number(section.steps[index])} around `
    + `${number(section.t_s[index])} s: ${number(section.slowest_us[index])} µs`;
  return [el("h3", { "data-step": String(id) }, words),
    tableOf(words, ["part", "µs"], rows)];
}
