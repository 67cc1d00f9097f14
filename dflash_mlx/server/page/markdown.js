// Markdown as it streams. Blocks whose text has not changed keep their elements, so that a selection or a scrolled code
// block stays as it is while the answer grows. What is unfinished (a fence, a table) is shown as far as it goes.

import { colour } from "./code.js";
import { button, copyText, h } from "./dom.js";
import { inline } from "./inline.js";

const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^\n]*?)[ \t]*$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const DELIMITER_ROW = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const DEEPEST = 20; // lists and quotes in each other

const isBlank = (line) => line === undefined || !line.trim();

/** Show `source` in `container`, in which nothing but earlier beginnings of it was shown. */
export function render(container, source) {
  const blocks = parse(source.replace(/\r\n?/g, "\n").split("\n"));
  const shown = container.shownBlocks ?? [];
  let same = 0;
  while (same < shown.length && same < blocks.length && shown[same] === blocks[same].raw) same++;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const block of blocks.slice(same)) container.append(block.make());
  container.shownBlocks = blocks.map((block) => block.raw);
}

/** Lines as blocks: `raw` decides what an element looks like, and `make` makes it. `loose`: blank lines between. */
function parse(lines, depth = 0) {
  const blocks = [];
  blocks.loose = false;
  for (let at = 0; at < lines.length;) {
    if (isBlank(lines[at])) {
      at++;
      continue;
    }
    const nested = depth < DEEPEST ? (quote(lines, at, depth) ?? list(lines, at, depth)) : null;
    const found =
      fence(lines, at) ?? heading(lines, at) ?? rule(lines, at) ?? nested ?? table(lines, at) ?? paragraph(lines, at);
    if (blocks.length && isBlank(lines[at - 1])) blocks.loose = true;
    blocks.push({ raw: lines.slice(at, found.end).join("\n"), make: found.make, tight: found.tight });
    at = found.end;
  }
  return blocks;
}

function fence(lines, at) {
  const found = FENCE.exec(lines[at]);
  if (!found || (found[2][0] === "`" && found[3].includes("`"))) return null;
  const [, indent, marks, info] = found;
  const close = new RegExp(`^ {0,3}\\${marks[0]}{${marks.length},}[ \\t]*$`);
  let end = at + 1;
  while (end < lines.length && !close.test(lines[end])) end++;
  const outdent = new RegExp(`^ {0,${indent.length}}`);
  const code = lines.slice(at + 1, end).map((line) => line.replace(outdent, ""));
  return { end: Math.min(end + 1, lines.length), make: () => codeBlock(code.join("\n"), info.split(/\s/)[0]) };
}

function codeBlock(code, language) {
  const copy = button("copy", { text: "Copy", "aria-label": "Copy the code" }, () => copyText(code, copy));
  const name = h("span", { class: "language", text: language });
  const body = h("code", language ? { class: `language-${language}` } : {}, ...colour(code, language));
  const scroller = h(
    "pre",
    { tabindex: "0", role: "group", "aria-label": language ? `Code in ${language}` : "Code" },
    body,
  );
  return h("div", { class: "code" }, h("div", { class: "code-head" }, name, copy), scroller);
}

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  // The page has levels 1 and 2 for itself.
  const level = Math.min(found[1].length + 2, 6);
  return { end: at + 1, make: () => h(`h${level}`, { "data-level": found[1].length }, ...inline(found[2] ?? "")) };
}

function rule(lines, at) {
  return RULE.test(lines[at]) ? { end: at + 1, make: () => h("hr") } : null;
}

function quote(lines, at, depth) {
  if (!QUOTE.test(lines[at])) return null;
  const inside = [];
  let end = at;
  for (; end < lines.length; end++) {
    if (QUOTE.test(lines[end])) inside.push(lines[end].replace(QUOTE, ""));
    else if (isBlank(lines[end]) || isBlank(inside.at(-1)) || beginsBlock(lines[end])) break;
    else inside.push(lines[end]);
  }
  return { end, make: () => h("blockquote", {}, ...parse(inside, depth + 1).map((block) => block.make())) };
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first || RULE.test(lines[at])) return null;
  const kind = first[2].at(-1);
  const items = [];
  let loose = false,
    end = at;
  for (let found = first; found;) {
    const item = listItem(lines, end, found);
    const children = parse(item.lines, depth + 1);
    items.push(children);
    end = item.end;
    const next = item.next < lines.length && !RULE.test(lines[item.next]) ? ITEM.exec(lines[item.next]) : null;
    found = next?.[2].at(-1) === kind ? next : null;
    loose ||= children.loose || (found !== null && item.next > item.end);
    if (found) end = item.next;
  }
  const number = parseInt(first[2], 10);
  const make = () => {
    const attributes = Number.isNaN(number) || number === 1 ? {} : { start: number };
    const made = items.map((children) =>
      h("li", {}, ...children.flatMap((block) => (loose ? [block.make()] : inTightItem(block)))),
    );
    return h(Number.isNaN(number) ? "ul" : "ol", attributes, ...made);
  };
  return { end, make };
}

/** The lines inside an item, where it ends, and the first line after it that is not blank. */
function listItem(lines, at, found) {
  const bare = found[1].length + found[2].length;
  const width = found[3].length > 4 || isBlank(lines[at].slice(found[0].length)) ? bare + 1 : found[0].length;
  const inside = [lines[at].slice(width)];
  let next = at + 1;
  for (; next < lines.length; next++) {
    const line = lines[next].replace(/^\t+/, (tabs) => " ".repeat(4 * tabs.length));
    if (isBlank(line)) {
      if (inside.length === 1 && isBlank(inside[0])) break; // an item may begin with one blank line at most
      inside.push("");
    } else if (line.length - line.trimStart().length >= width) inside.push(line.slice(width));
    else if (isBlank(inside.at(-1)) || beginsBlock(line)) break;
    else inside.push(line);
  }
  let end = next;
  while (end > at + 1 && isBlank(lines[end - 1])) end--;
  while (next < lines.length && isBlank(lines[next])) next++;
  return { lines: inside.slice(0, end - at), end, next };
}

/** In a list without blank lines, paragraphs are no paragraphs. */
function inTightItem(block) {
  const made = block.make();
  return made.nodeName === "P" ? [...made.childNodes, "\n"] : [made];
}

function cells(line) {
  const inside = line
    .trim()
    .replace(/^\|/, "")
    .replace(/((?:^|[^\\])(?:\\\\)*)\|$/, "$1");
  return inside.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function startsTable(lines, at) {
  const row = lines[at + 1];
  if (row === undefined || !row.includes("-") || !DELIMITER_ROW.test(row)) return false;
  if (!row.includes("|") || !lines[at].includes("|")) return false;
  return cells(lines[at]).length === cells(row).length;
}

function table(lines, at) {
  if (!startsTable(lines, at)) return null;
  const head = cells(lines[at]);
  const sides = cells(lines[at + 1]).map((cell) =>
    cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "",
  );
  let end = at + 2;
  while (end < lines.length && !isBlank(lines[end]) && !beginsBlock(lines[end])) end++;
  const row = (tag, texts) =>
    h("tr", {}, ...head.map((_, i) => h(tag, { class: sides[i] || null }, ...inline(texts[i] ?? ""))));
  const make = () => {
    const rows = lines.slice(at + 2, end).map((line) => row("td", cells(line)));
    const parts = [h("thead", {}, row("th", head)), rows.length ? h("tbody", {}, ...rows) : null];
    return h("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, h("table", {}, ...parts));
  };
  return { end, make };
}

/** Whether a line ends the paragraph before it. */
function interrupts(line) {
  const item = ITEM.exec(line);
  const startsList =
    item && !isBlank(line.slice(item[0].length)) && (!/^\d/.test(item[2]) || parseInt(item[2], 10) === 1);
  return Boolean(startsList) || QUOTE.test(line) || HEADING.test(line) || RULE.test(line) || fence([line], 0) !== null;
}

/** Whether a line ends an item, a quote or a table before it; to begin a list there, any item will do. */
function beginsBlock(line) {
  return ITEM.test(line) || interrupts(line);
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && !interrupts(lines[end]) && !startsTable(lines, end)) end++;
  const text = lines
    .slice(at, end)
    .map((line) => line.trimStart())
    .join("\n")
    .trimEnd();
  return { end, make: () => h("p", {}, ...inline(text)) };
}
