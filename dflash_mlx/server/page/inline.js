// The inside of a paragraph: emphasis, code, links. The rules are CommonMark's, without HTML and reference links; what
// a browser would fetch by itself, such as pictures, becomes a link.

import { h } from "./dom.js";

const PUNCTUATION = /[\p{P}\p{S}]/u;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const ENTITIES = {
  amp: "&",
  lt: "<",
  gt: ">",
  quot: '"',
  apos: "'",
  nbsp: "\u00a0",
  hellip: "…",
  mdash: "—",
  ndash: "–",
};
const ADDRESS = /https?:\/\/[^\s<>"`]+/y;
const LONGEST = 50000; // longer paragraphs are shown as they are

/** The nodes for a paragraph's text. */
export function inline(text) {
  if (text.length > LONGEST) return [document.createTextNode(text)];
  return new Scanner(text).nodes();
}

class Scanner {
  constructor(text) {
    this.text = text;
    this.at = 0;
    // Strings, elements, and what may become elements: { char, count, length, opens, closes } or { bracket, active }.
    this.tokens = [];
    this.brackets = []; // the places in `tokens` of brackets that may still begin a link
  }

  nodes() {
    while (this.at < this.text.length) this.step();
    return finished(this.tokens);
  }

  step() {
    const { text, at } = this;
    switch (text[at]) {
      case "\\":
        return this.escape();
      case "`":
        return this.code();
      case "<":
        return this.angled();
      case "&":
        return this.entity();
      case "\n":
        return this.lineEnd();
      case "*":
      case "_":
      case "~":
        return this.delimiters();
      case "[":
        return this.open("[");
      case "]":
        return this.close();
      case "!":
        return text[at + 1] === "[" ? this.open("![") : this.plain(1);
      case "h":
        return this.address();
      default: {
        const rest = /[\\`<&\n*_~[\]!h]/g;
        rest.lastIndex = at + 1;
        this.plain((rest.exec(text)?.index ?? text.length) - at);
      }
    }
  }

  plain(length) {
    this.tokens.push(this.text.slice(this.at, (this.at += length)));
  }

  put(token, length) {
    this.tokens.push(token);
    this.at += length;
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === "\n") return this.put(h("br"), 2);
    return next && ESCAPABLE.test(next) ? this.put(next, 2) : this.plain(1);
  }

  code() {
    const [fence] = /^`+/.exec(this.text.slice(this.at));
    const inside = this.at + fence.length;
    const runs = /`+/g;
    runs.lastIndex = inside;
    for (let found; (found = runs.exec(this.text));) {
      if (found[0].length !== fence.length) continue;
      let code = this.text.slice(inside, found.index).replaceAll("\n", " ");
      if (/^ .*[^ ].* $/.test(code) || /^ [^ ] $/.test(code)) code = code.slice(1, -1);
      return this.put(h("code", { text: code }), found.index + fence.length - this.at);
    }
    return this.plain(fence.length);
  }

  angled() {
    const found = /^<(https?:\/\/[^\s<>]+)>/i.exec(this.text.slice(this.at, this.at + 2000));
    return found ? this.put(link(found[1], [found[1]]), found[0].length) : this.plain(1);
  }

  entity() {
    const found = /^&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|(\w{2,8}));/.exec(this.text.slice(this.at, this.at + 12));
    if (!found) return this.plain(1);
    const number = found[1] ? Number(found[1]) : parseInt(found[2] ?? "", 16);
    const valid = number > 0 && number <= 0x10ffff && !(number >= 0xd800 && number <= 0xdfff);
    const char = found[3]
      ? Object.hasOwn(ENTITIES, found[3])
        ? ENTITIES[found[3]]
        : found[0]
      : valid
        ? String.fromCodePoint(number)
        : "\ufffd";
    return this.put(char, found[0].length);
  }

  lineEnd() {
    const last = this.tokens.at(-1);
    if (typeof last === "string") {
      const hard = last.endsWith("  ");
      this.tokens[this.tokens.length - 1] = last.trimEnd();
      if (hard) this.tokens.push(h("br"));
    }
    const [end] = /^\n */.exec(this.text.slice(this.at));
    this.put("\n", end.length);
  }

  delimiters() {
    const { text, at } = this;
    const char = text[at];
    let end = at;
    while (text[end] === char) end++;
    const count = end - at;
    if (char === "~" && count !== 2) return this.plain(count);
    const before = at ? lastChar(text, at) : " ";
    const after = end < text.length ? String.fromCodePoint(text.codePointAt(end)) : " ";
    const spaceBefore = /\s/.test(before),
      spaceAfter = /\s/.test(after);
    const signBefore = PUNCTUATION.test(before),
      signAfter = PUNCTUATION.test(after);
    const left = !spaceAfter && (!signAfter || spaceBefore || signBefore);
    const right = !spaceBefore && (!signBefore || spaceAfter || signAfter);
    const opens = char === "_" ? left && (!right || signBefore) : left;
    const closes = char === "_" ? right && (!left || signAfter) : right;
    return this.put({ char, count, length: count, opens, closes }, count);
  }

  open(bracket) {
    this.brackets.push(this.tokens.length);
    this.put({ bracket, active: true }, bracket.length);
  }

  close() {
    const start = this.brackets.pop();
    const opener = this.tokens[start];
    const found = opener?.active ? destination(this.text, this.at + 1) : null;
    if (!found) return this.plain(1);
    const inside = finished(this.tokens.splice(start + 1));
    this.tokens.pop();
    // No links in links.
    if (opener.bracket === "[") for (const token of this.tokens) if (token.bracket === "[") token.active = false;
    this.tokens.push(link(found.address, inside));
    this.at = found.end;
  }

  address() {
    ADDRESS.lastIndex = this.at;
    const wordBefore = this.at > 0 && /[\p{L}\p{N}]/u.test(this.text[this.at - 1]);
    const found = wordBefore || this.brackets.length ? null : ADDRESS.exec(this.text);
    if (!found) return this.plain(1);
    let address = found[0].replace(/[*_~]+$/, "");
    // A full stop or bracket after an address is the sentence's.
    for (let shorter; address !== (shorter = withoutEnd(address));) address = shorter;
    return this.put(link(address, [address]), address.length);
  }
}

function lastChar(text, at) {
  const low = text.charCodeAt(at - 1);
  return low >= 0xdc00 && low <= 0xdfff ? text.slice(at - 2, at) : text[at - 1];
}

function withoutEnd(address) {
  if (/[.,:;!?'"]$/.test(address)) return address.slice(0, -1);
  const count = (sign) => address.split(sign).length;
  return address.endsWith(")") && count(")") > count("(") ? address.slice(0, -1) : address;
}

/** What stands in the brackets after a link's text: its address, and where they end. */
function destination(text, at) {
  const found =
    /^\(\s*(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\((?:[^\s()\\]|\\.)*\))*))(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/.exec(
      text.slice(at, at + 4000),
    );
  return found && { address: (found[1] ?? found[2]).replace(/\\([!-/:-@[-`{-~])/g, "$1"), end: at + found[0].length };
}

/** A link where the address is one of the web's; otherwise only its text. */
function link(address, children) {
  let url = null;
  try {
    url = new URL(address);
  } catch {
    // A path of somewhere else.
  }
  const safe = url && (url.protocol === "https:" || url.protocol === "http:");
  if (!safe) return h("span", {}, ...children);
  return h("a", { href: url.href, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

/** Tokens as nodes: pairs of delimiters become emphasis, and what is left of them is text. */
function finished(tokens) {
  for (let at = 0; at < tokens.length; at++) {
    while (tokens[at]?.closes && tokens[at].count) {
      const start = openerOf(tokens, at);
      if (start < 0) break;
      at = wrap(tokens, start, at);
    }
  }
  const nodes = [];
  for (const token of tokens) {
    const node = token instanceof Node ? token : document.createTextNode(textOf(token));
    if (node.nodeType === Node.TEXT_NODE && nodes.at(-1)?.nodeType === Node.TEXT_NODE) nodes.at(-1).data += node.data;
    else nodes.push(node);
  }
  return nodes;
}

function openerOf(tokens, at) {
  const closer = tokens[at];
  return tokens.findLastIndex((token, i) => {
    if (i >= at || token.char !== closer.char || !token.opens || !token.count) return false;
    const unequal = (token.closes || closer.opens) && (token.length + closer.length) % 3 === 0;
    return !unequal || (token.length % 3 === 0 && closer.length % 3 === 0);
  });
}

/** Put what stands between two delimiters into an element; where the closer, or what follows it, is then. */
function wrap(tokens, start, end) {
  const opener = tokens[start],
    closer = tokens[end];
  const used = opener.char === "~" || (opener.count >= 2 && closer.count >= 2) ? 2 : 1;
  const tag = opener.char === "~" ? "s" : used === 2 ? "strong" : "em";
  const inside = tokens.slice(start + 1, end).map((token) => (token instanceof Node ? token : textOf(token)));
  opener.count -= used;
  closer.count -= used;
  tokens.splice(start + 1, end - start - 1, h(tag, {}, ...inside));
  return start + 2;
}

function textOf(token) {
  if (typeof token === "string") return token;
  return token.bracket ?? token.char.repeat(token.count);
}
