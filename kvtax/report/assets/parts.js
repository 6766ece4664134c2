"use strict";
// Words, tables and verdicts. All text goes in as text, never as HTML.

const DASH = "\u2013";
// Rows of a table that are shown before a button shows all.
const FOLDED_ROWS = 20;

/** An element with attributes and children; strings become text. */
function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** A number with enough digits to be read, and no more. */
function number(value) {
  if (value === null || value === undefined) return DASH;
  const size = Math.abs(value);
  const digits = Number.isInteger(value) || size >= 1000 ? 0 : size >= 10 ? 1 : 2;
  return value.toLocaleString("en", {
    minimumFractionDigits: digits,
    maximumFractionDigits: digits,
  });
}

/** Text as nodes: `code`, **emphasis** and line breaks, the words of links, all else as is. */
function marked(text) {
  return String(text).split(/(\[[^\]]+\]\([^)\s]+\)|`[^`]+`|\*\*.+?\*\*|\n)/).flatMap((part) => {
    const link = /^\[([^\]]+)\]\([^)\s]+\)$/.exec(part);
    if (link) return marked(link[1]);
    if (part === "\n") return el("br");
    if (/^`.+`$/.test(part)) return el("code", {}, part.slice(1, -1));
    if (/^\*\*.+\*\*$/.test(part)) return el("strong", {}, ...marked(part.slice(2, -2)));
    return part;
  });
}

const unmarked = (text) => text.replace(/`([^`]+)`|\*\*(.+?)\*\*/g,
  (_, code, strong) => code ?? unmarked(strong));
const plain = (text) => unmarked(text).replaceAll("\n", "; ");

/** Paragraphs; neighbouring ones that begin with "- " are one list. */
function paragraphs(texts) {
  const shown = [];
  for (const text of texts) {
    const item = /^( *)- (.*)$/s.exec(text);
    if (!item) {
      shown.push(el("p", {}, ...marked(text)));
      continue;
    }
    if (shown.at(-1)?.tagName !== "UL") shown.push(el("ul"));
    shown.at(-1).append(el("li", { class: item[1] ? "inner" : null }, ...marked(item[2])));
  }
  return shown;
}

const cellText = (value) => (typeof value === "number" || value === null
  ? [number(value)] : marked(value));

/** Nodes whose long names may break behind a dot, a slash or an underscore. */
function breakable(nodes) {
  return nodes.flatMap((node) => {
    if (typeof node !== "string") {
      const inner = [...node.childNodes].map((one) => one.nodeType === 3 ? one.data : one);
      if (inner.length) node.replaceChildren(...breakable(inner));
      return node;
    }
    return node.split(/(?<=[._\/])(?=[^\d\s])/).flatMap((part, i) =>
      (i ? [el("wbr"), part] : [part]));
  });
}

/** Verdicts by the words that a table has for them. */
const VERDICTS = {
  grows: "grows", stalls: "stalls", flat: "flat", drifts: "drifts", inconclusive: "inconclusive",
  failed: "failed", "grows with time": "drifts", "not known": "inconclusive",
};
const AT_MOST = /^at most [\d.,]+ µs$/;

function verdictOf(text) {
  return AT_MOST.test(text) ? "flat" : VERDICTS[text];
}

function cellOf(value, index, column) {
  if (index === 0) return el("th", { scope: "row" }, ...breakable(cellText(value)));
  const name = { "data-name": plain(column) };
  const text = typeof value === "string" ? plain(value) : "";
  const verdict = verdictOf(text);
  if (verdict) return el("td", name, el("span", { class: `verdict ${verdict}` }, text));
  if (typeof value !== "string") return el("td", name, ...cellText(value));
  return el("td", { ...name, class: value.length > 24 ? "text" : "short" },
    el("span", {}, ...breakable(cellText(value))));
}

/** Sets tables closer where there is no room for them, then breaks their words, then
 * shows each row as a card. */
const NARROWER = ["close", "broken", "cards"];
const fitted = new WeakMap();
const fitTables = (tables) => requestAnimationFrame(() => {
  tables.forEach((one) => {
    fitted.set(one, one.clientWidth);
    one.classList.remove(...NARROWER);
  });
  for (const way of NARROWER) {
    const wide = tables.filter((one) => one.scrollWidth > one.clientWidth);
    wide.forEach((one) => { one.classList.add(way); });
  }
});
const fit = new ResizeObserver((entries) => fitTables(entries.map((one) => one.target)
  .filter((one) => fitted.get(one) !== one.clientWidth)));
// A table in a closed section has its width, and not yet its content.
addEventListener("toggle", (event) => {
  fitTables([...event.target.querySelectorAll(".scroll")]);
}, true);

/** A table that can be scrolled by keyboard where a screen is too narrow for it. */
function tableOf(caption, columns, rows) {
  const head = el("tr", {}, ...columns.map((name) => el("th", { scope: "col" },
    ...breakable(marked(name)))));
  const body = rows.map((row) => el("tr", {}, ...row.map((value, i) => cellOf(value, i, columns[i]))));
  const folded = body.slice(FOLDED_ROWS);
  const table = el("table", {}, el("thead", {}, head), el("tbody", {}, ...body));
  const shown = el("div", { class: "scroll", tabindex: "0", role: "region",
    "aria-label": caption }, table);
  fit.observe(shown);
  if (folded.length < 3) return shown;
  folded.forEach((row) => { row.hidden = true; });
  const more = el("button", { type: "button", onclick: () => {
    folded.forEach((row) => { row.hidden = false; });
    more.remove();
  } }, `Show all ${number(rows.length)} rows`);
  shown.append(more);
  return shown;
}

function saveButton(words, name, content) {
  return el("button", { type: "button", onclick: async () => {
    const url = URL.createObjectURL(await content());
    const link = el("a", { href: url, download: name });
    document.body.append(link);
    link.click();
    link.remove();
    URL.revokeObjectURL(url);
  } }, words);
}

/** Columns and rows as CSV: RFC 4180, and no cell that a spreadsheet would run. */
function csv(columns, rows) {
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    if (typeof value === "number") return String(value);
    const words = plain(String(value));
    const text = /^[=+\-@\t\r]/.test(words) ? `'${words}` : words;
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return new Blob([[columns, ...rows].map((row) => row.map(cell).join(",")).join("\r\n"),
    "\r\n"], { type: "text/csv" });
}

const fileName = (title, ending) =>
  `${title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "")}.${ending}`;

function showWords(section) {
  return el("section", {}, el("h2", {}, ...marked(section.title)),
    ...paragraphs(section.paragraphs));
}

function showTable(section) {
  const table = tableOf(section.title, section.columns, section.rows);
  const save = saveButton("Save as CSV", fileName(section.title, "csv"),
    () => csv(section.columns, section.rows));
  const note = section.note ? el("p", { class: "note" }, ...marked(section.note)) : null;
  if (section.open) {
    return el("section", {}, el("h2", {}, ...marked(section.title)), note, table,
      el("div", { class: "tools" }, save));
  }
  return el("section", {}, el("details", {}, el("summary", {}, ...marked(section.title)), note, table,
    el("div", { class: "tools" }, save)));
}

function showVerdicts(section) {
  const items = section.verdicts.map((one) => {
    const words = [el("code", {}, one.name), " ",
      el("span", { class: `verdict ${one.verdict}` }, one.verdict), ": ", ...marked(one.words)];
    if (!one.reasons) return el("li", {}, ...words);
    return el("li", {}, el("details", {}, el("summary", {}, ...words),
      one.reasons.note ? el("p", { class: "note" }, ...marked(one.reasons.note)) : null,
      tableOf(`${one.name}: ${one.reasons.title}`, one.reasons.columns, one.reasons.rows)));
  });
  return el("section", {}, el("h2", {}, ...marked(section.title)),
    el("ul", { class: "verdicts" }, ...items));
}

function showWarnings(warnings) {
  if (!warnings.length) return null;
  const items = warnings.map((one) => el("li", {},
    one.place ? el("code", {}, one.place) : null, one.place ? ": " : null,
    ...marked(`${one.message}. `), el("em", {}, ...marked(one.remedy.replace(/\.?$/, ".")))));
  const many = warnings.length > 3;
  const list = el("ul", {}, ...items);
  const told = `${warnings.length} warning${warnings.length > 1 ? "s" : ""}`;
  return el("aside", { class: "warnings", "aria-label": "Warnings" },
    el("details", many ? {} : { open: "" }, el("summary", {}, told), list));
}
