// How messages look: the user's as typed, the model's as Markdown, with reasoning folded away.

import { button, copyText, h } from "./dom.js";
import { render } from "./markdown.js";
import { totals } from "./strip.js";

const BLOCKS = ["block-1", "block-2", "block-3"]; // the newest first; the style sheet has their colours
const canMark = "highlights" in CSS;

export class UserView {
  /** actions: edit(text) sends the question again in other words. */
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.element = h("article", { class: "message user", "aria-label": "You" });
    this.show();
  }

  show() {
    const copy = button("copy", { text: "Copy" }, () => copyText(this.message.content, copy));
    this.editButton = button("pencil", { text: "Edit" }, () => this.edit());
    this.element.replaceChildren(
      h("div", { class: "bubble", text: this.message.content }),
      h("div", { class: "actions" }, this.editButton, copy),
    );
  }

  edit() {
    const area = h("textarea", { "aria-label": "Edit the question", rows: "1" });
    area.value = this.message.content;
    const cancel = () => {
      this.show();
      this.editButton.focus();
    };
    const send = () => area.value.trim() && this.actions.edit(area.value.trim());
    area.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        send();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        cancel();
      }
    });
    area.addEventListener("input", () => grow(area));
    const buttons = [button(null, { text: "Cancel" }, cancel), button(null, { text: "Send", class: "primary" }, send)];
    this.element.replaceChildren(h("div", { class: "editor" }, area, h("div", { class: "row end" }, ...buttons)));
    grow(area);
    area.focus();
  }
}

export class AnswerView {
  /** actions: retry() asks for the answer once more. */
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.content = h("div", { class: "content" });
    this.reasoning = h("div", { class: "reasoning-text" });
    this.summary = h("summary", { text: "Reasoning" });
    this.details = h("details", { class: "reasoning", hidden: true }, this.summary, this.reasoning);
    this.state = h("p", { class: "state", hidden: true });
    this.footer = h("div", { class: "actions" });
    const parts = [this.details, this.content, this.state, this.footer];
    this.element = h("article", { class: "message answer", "aria-label": "Answer" }, ...parts);
    this.marks = []; // of the newest blocks, the last first: how many characters, and whether drafts were kept
    this.length = 0;
    this.update();
    if (!message.pending) this.finish();
  }

  /** Show what has come; `drafted` where it came with drafts that were kept. */
  update(drafted = false) {
    const { content, reasoning, pending } = this.message;
    this.element.classList.toggle("pending", Boolean(pending));
    this.details.hidden = !reasoning;
    if (reasoning && this.reasoning.textContent !== reasoning) this.reasoning.textContent = reasoning;
    this.summary.textContent = pending && reasoning && !content ? "Reasoning …" : "Reasoning";
    render(this.content, content);
    if (pending && canMark) this.mark(drafted);
  }

  /** Colour the newest blocks, so that one sees them arrive. */
  mark(drafted) {
    const texts = shownTexts(this.content);
    const length = texts.reduce((sum, text) => sum + text.length, 0);
    if (length > this.length)
      this.marks = [{ length: length - this.length, drafted }, ...this.marks].slice(0, BLOCKS.length);
    this.length = length;
    let end = length;
    BLOCKS.forEach((name, i) => {
      const { length: size = 0, drafted: colour = false } = this.marks[i] ?? {};
      const ranges = colour ? rangesOf(texts, Math.max(0, end - size), end) : [];
      end -= size;
      CSS.highlights.set(name, new Highlight(...ranges));
    });
  }

  finish() {
    const { content, error, stopped, finish } = this.message;
    if (canMark) for (const name of BLOCKS) CSS.highlights.delete(name);
    const cut = finish === "length" ? "The answer reached the most tokens it may have." : null;
    const state = error ?? (stopped ? "Stopped." : cut);
    this.state.hidden = !state;
    this.state.textContent = state ?? "";
    this.state.classList.toggle("error", Boolean(error));
    const retry = button("retry", { text: "Retry" }, () => this.actions.retry());
    const copy = button("copy", { text: "Copy" }, () => copyText(content, copy));
    this.footer.replaceChildren(
      retry,
      ...(content ? [copy] : []),
      h("span", { class: "figures", text: figures(this.message) }),
    );
  }
}

/** An answer's figures in one line, next to those of the answer that it replaced. */
export function figures({ rounds = [], speed, draft, before }) {
  if (!rounds.length) return "";
  const { tokens, acceptanceLength } = totals(rounds);
  const words = [`${tokens} ${tokens === 1 ? "token" : "tokens"}`];
  if (speed) words.push(`${speed.toFixed(1)} tok/s`);
  const length = acceptanceLength?.toFixed(2);
  words.push(acceptanceLength ? `acceptance length ${length}` : draft ? "no drafts" : "drafting off");
  if (before?.speed && before.draft !== draft)
    words.push(`${before.draft ? "with" : "without"} drafting ${before.speed.toFixed(1)} tok/s`);
  return words.join(" · ");
}

/** The text nodes of an answer, without the labels of buttons. */
function shownTexts(root) {
  const accept = (node) => {
    if (node.nodeType === Node.TEXT_NODE) return NodeFilter.FILTER_ACCEPT;
    return node.classList.contains("code-head") ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_SKIP;
  };
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT, accept);
  const texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode);
  return texts;
}

function rangesOf(texts, from, to) {
  const ranges = [];
  let at = 0;
  for (const text of texts) {
    const start = Math.max(from - at, 0),
      end = Math.min(to - at, text.length);
    if (start < end) {
      const range = new StaticRange({ startContainer: text, startOffset: start, endContainer: text, endOffset: end });
      ranges.push(range);
    }
    at += text.length;
  }
  return ranges;
}

/** Let a text field be as high as its text, within the style sheet's limit. */
export function grow(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
}
