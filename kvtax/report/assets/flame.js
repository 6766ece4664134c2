"use strict";
// Where the time of steps went in the code: an icicle of function calls, a box each.

const BOX_PX = 20;
const LEAST_PX = 2;
const LETTER_PX = 6.5;
const MOST_FUNCTIONS = 40;

function showFlame(section) {
  const state = { thread: section.threads[0], zoom: null, at: null, find: "" };
  const holder = el("div", { class: "flame", tabindex: "0", role: "group",
    "aria-label": `${section.title}. Down and up go into a call and out of it, left and `
      + "right to the next, Enter enlarges, Escape shows all." });
  const spoken = el("p", { class: "note", "aria-live": "polite" });
  const table = el("div", {});
  const draw = () => drawFlame(holder, state);
  const choose = (thread) => {
    state.thread = thread;
    state.root = callTree(section.frames, thread);
    state.zoom = state.at = state.root;
    draw();
    table.replaceChildren(tableOf(`${section.title}, ${thread.name}`, COLUMNS,
      functions(state.root).slice(0, MOST_FUNCTIONS)));
    spoken.textContent = "";
  };
  const go = (call, zoom) => {
    state.at = call;
    if (zoom) state.zoom = call;
    draw();
    spoken.textContent = told(call, state.root);
  };
  holder.addEventListener("click", (event) => {
    const box = event.target.closest("[data-call]");
    if (box) go(holder.calls[Number(box.dataset.call)], true);
  });
  holder.addEventListener("keydown", (event) => {
    const call = nextCall(event.key, state);
    if (!call) return;
    event.preventDefault();
    go(call, event.key === "Enter" || event.key === "Escape");
  });
  const threads = el("select", { onchange: (event) =>
    choose(section.threads[event.target.selectedIndex]) },
  ...section.threads.map((thread) => el("option", {}, thread.name)));
  const find = el("input", { type: "search", oninput: () => {
    state.find = find.value.toLowerCase();
    draw();
    spoken.textContent = state.find ? found(state) : "";
  } });
  choose(section.threads[0]);
  // It has no width before it is on the page.
  let width = 0;
  new ResizeObserver(() => {
    if (holder.clientWidth === width) return;
    width = holder.clientWidth;
    requestAnimationFrame(draw);
  }).observe(holder);
  const parts = [section.note ? el("p", { class: "note" }, section.note) : "",
    el("div", { class: "tools" }, el("label", {}, "Thread ", threads),
      el("label", {}, "Find ", find)),
    holder, spoken,
    el("div", { class: "tools" },
      saveButton("Save as PNG", fileName(section.title, "png"), () => flamePng(holder)),
      saveButton("Save as CSV", fileName(section.title, "csv"),
        () => csv(COLUMNS, functions(state.root))),
      saveButton("Save for speedscope", fileName(section.title, "speedscope.json"),
        () => speedscope(section))),
    el("details", {}, el("summary", {}, "As a table"), table)];
  return section.open ? el("section", {}, el("h2", {}, section.title), ...parts)
    : el("section", {}, el("details", {}, el("summary", {}, section.title), ...parts));
}

const COLUMNS = ["function", "µs per step in it", "of that in its own code"];

/** The calls of a thread as a tree: us per step in each, and in its own code. */
function callTree(frames, thread) {
  const root = { name: "all", us: 0, own: 0, depth: 0, calls: new Map(), above: null };
  thread.stacks.forEach((stack, index) => {
    const us = thread.us[index];
    let call = root;
    root.us += us;
    for (const frame of stack) {
      if (!call.calls.has(frame)) {
        call.calls.set(frame, { name: frames[frame], us: 0, own: 0,
          depth: call.depth + 1, calls: new Map(), above: call });
      }
      call = call.calls.get(frame);
      call.us += us;
    }
    call.own += us;
  });
  return root;
}

const heaviest = (call) => [...call.calls.values()].sort((a, b) => b.us - a.us);

/** A row for each function: a call of itself within a function counts once. */
function functions(root) {
  const rows = new Map();
  const visit = (call, outer) => {
    const row = rows.get(call.name) ?? [call.name, 0, 0];
    rows.set(call.name, row);
    if (!outer.has(call.name)) row[1] += call.us;
    row[2] += call.own;
    const inner = new Set(outer).add(call.name);
    call.calls.forEach((one) => visit(one, inner));
  };
  root.calls.forEach((call) => visit(call, new Set()));
  return [...rows.values()].sort((a, b) => b[2] - a[2]);
}

const told = (call, root) => `${call.name}: ${number(call.us)} µs per step, `
  + `${number(100 * call.us / (root.us || 1))} %; in its own code ${number(call.own)} µs`;

function found(state) {
  let us = 0;
  const visit = (call) => {
    if (call.name.toLowerCase().includes(state.find)) us += call.us;
    else call.calls.forEach(visit);
  };
  state.root.calls.forEach(visit);
  return `${number(us)} µs per step in calls that match`;
}

function nextCall(key, state) {
  const beside = state.at.above ? heaviest(state.at.above) : [state.at];
  const place = beside.indexOf(state.at);
  switch (key) {
    case "ArrowDown": return heaviest(state.at)[0];
    case "ArrowUp": return state.at.above;
    case "ArrowRight": return beside[place + 1];
    case "ArrowLeft": return beside[place - 1];
    case "Enter": return state.at;
    case "Escape": return state.root;
    default: return null;
  }
}

/** What is wide enough to be seen, as {call, left, width}, the enlarged call on top. */
function boxes(state, width) {
  const placed = [];
  const place = (call, left, scale) => {
    if (call.us * scale < LEAST_PX) return;
    placed.push({ call, left, width: call.us * scale });
    let at = left;
    for (const one of heaviest(call)) {
      place(one, at, scale);
      at += one.us * scale;
    }
  };
  if (state.zoom.us) place(state.zoom, 0, width / state.zoom.us);
  return placed;
}

function drawFlame(holder, state) {
  const width = holder.clientWidth || 600;
  const placed = boxes(state, width);
  holder.calls = placed.map(({ call }) => call);
  holder.placed = placed;
  const deepest = Math.max(0, ...placed.map(({ call }) => call.depth - state.zoom.depth));
  holder.style.height = `${(deepest + 1) * BOX_PX}px`;
  holder.replaceChildren(...placed.map((box, index) => {
    const element = el("div", { "data-call": String(index), class: boxClass(box, state),
      title: told(box.call, state.root) }, label(box));
    Object.assign(element.style, { left: `${box.left}px`, width: `${box.width}px`,
      top: `${(box.call.depth - state.zoom.depth) * BOX_PX}px`,
      background: shade(box.call) });
    return element;
  }));
}

function boxClass({ call }, state) {
  const hit = state.find && call.name.toLowerCase().includes(state.find);
  return [hit ? "hit" : "", call === state.at ? "at" : ""].join(" ").trim();
}

const label = ({ call, width }) =>
  (width < 4 * LETTER_PX ? "" : call.name.slice(0, Math.floor(width / LETTER_PX)));

/** Pale, by the file, so that dark letters can be read on it. */
function shade(call) {
  const file = call.name.replace(/^.*\(|:.*$/g, "");
  let hash = 0;
  for (const letter of file) hash = (hash * 31 + letter.codePointAt(0)) % 360;
  return `hsl(${hash} 55% 78%)`;
}

function flamePng(holder) {
  const scale = devicePixelRatio;
  const canvas = el("canvas", { width: holder.clientWidth * scale,
    height: holder.clientHeight * scale });
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.fillStyle = cssColour("--back");
  context.fillRect(0, 0, holder.clientWidth, holder.clientHeight);
  context.font = "11px sans-serif";
  const top = holder.placed[0]?.call.depth ?? 0;
  for (const box of holder.placed) {
    const y = (box.call.depth - top) * BOX_PX;
    context.fillStyle = shade(box.call);
    context.fillRect(box.left, y, Math.max(box.width - 1, 1), BOX_PX - 1);
    context.fillStyle = "#111";
    context.fillText(label(box), box.left + 3, y + 14);
  }
  return new Promise((done) => { canvas.toBlob(done, "image/png"); });
}

/** All threads in speedscope's file format, which its app and others open. */
function speedscope(section) {
  const profiles = section.threads.map((thread) => ({
    type: "sampled",
    name: `${thread.name}, µs per step`,
    unit: "microseconds",
    startValue: 0,
    endValue: thread.us.reduce((sum, us) => sum + us, 0),
    samples: thread.stacks,
    weights: thread.us,
  }));
  return new Blob([JSON.stringify({
    $schema: "https://www.speedscope.app/file-format-schema.json",
    name: section.title,
    shared: { frames: section.frames.map((name) => ({ name })) },
    profiles,
  })], { type: "application/json" });
}
