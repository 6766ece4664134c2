"use strict";
// Words, tables and verdicts. All text goes in as text, never as HTML.

const DASH = "\u2013";

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
    if (/^\*\*.+\*\*$/.test(part)) return el("strong", {}, part.slice(2, -2));
    return part;
  });
}

const plain = (text) => text.replace(/`([^`]+)`|\*\*(.+?)\*\*/g, "$1$2")
  .replaceAll("\n", "; ");

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

/** A table that can be scrolled by keyboard where it is too wide. */
function tableOf(caption, columns, rows) {
  const head = el("tr", {}, ...columns.map((name) => el("th", { scope: "col" }, ...marked(name))));
  const body = rows.map((row) => el("tr", {}, ...row.map((value, index) => {
    const words = typeof value === "string" && value.length > 24 && index > 0;
    if (index === 0) return el("th", { scope: "row" }, ...cellText(value));
    return el("td", { class: words ? "text" : null }, ...cellText(value));
  })));
  const table = el("table", {}, el("thead", {}, head), el("tbody", {}, ...body));
  return el("div", { class: "scroll", tabindex: "0", role: "region",
    "aria-label": caption }, table);
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
  return el("section", {}, el("h2", {}, section.title),
    ...paragraphs(section.paragraphs));
}

function showPicture(section) {
  const source = `data:image/png;base64,${section.png}`;
  return el("section", {}, el("figure", {}, el("img", { src: source, alt: section.title }),
    el("figcaption", {}, section.title)));
}

function showTable(section) {
  const table = tableOf(section.title, section.columns, section.rows);
  const save = saveButton("Save as CSV", fileName(section.title, "csv"),
    () => csv(section.columns, section.rows));
  const note = section.note ? el("p", { class: "note" }, ...marked(section.note)) : null;
  if (section.open) {
    return el("section", {}, el("h2", {}, section.title), note, table,
      el("div", { class: "tools" }, save));
  }
  return el("section", {}, el("details", {}, el("summary", {}, section.title), note, table,
    el("div", { class: "tools" }, save)));
}

function showVerdicts(section) {
  const items = section.verdicts.map((one) => {
    const words = [el("code", {}, one.name), " ",
      el("span", { class: `verdict ${one.verdict}` }, one.verdict), `: ${one.words}`];
    if (!one.reasons) return el("li", {}, ...words);
    return el("li", {}, el("details", {}, el("summary", {}, ...words),
      one.reasons.note ? el("p", { class: "note" }, one.reasons.note) : null,
      tableOf(`${one.name}: ${one.reasons.title}`, one.reasons.columns, one.reasons.rows)));
  });
  return el("section", {}, el("h2", {}, section.title),
    el("ul", { class: "verdicts" }, ...items));
}

function showWarnings(warnings) {
  if (!warnings.length) return null;
  const items = warnings.map((one) => el("li", {},
    one.place ? el("code", {}, one.place) : null, one.place ? ": " : null,
    `${one.message}. `, el("em", {}, one.remedy.replace(/\.?$/, "."))));
  const many = warnings.length > 3;
  const list = el("ul", {}, ...items);
  const told = `${warnings.length} warning${warnings.length > 1 ? "s" : ""}`;
  return el("aside", { class: "warnings", "aria-label": "Warnings" },
    el("details", many ? {} : { open: "" }, el("summary", {}, told), list));
}
