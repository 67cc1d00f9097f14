// The open conversation: its messages, and the answer that is being made.

import { answer, KeyNeeded } from "./api.js";
import { byId, notify } from "./dom.js";
import { AnswerView, UserView } from "./messages.js";
import * as store from "./store.js";
import { Strip, totals } from "./strip.js";

const ROUNDS_KEPT = 2000;

export class Chat {
  /** actions: askKey() resolves to whether a key was given; changed() after every change to show elsewhere. */
  constructor(actions) {
    this.actions = actions;
    this.strip = new Strip();
    this.scroller = byId("scroller");
    this.log = byId("log");
    this.pinned = true;
    this.scroller.addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = this.scroller;
      this.pinned = scrollHeight - scrollTop - clientHeight < 60;
      byId("newest").hidden = this.pinned;
    });
    addEventListener("pagehide", () => this.keep());
  }

  get busy() {
    return Boolean(this.aborter);
  }

  open(conversation) {
    this.stop();
    this.conversation = conversation;
    this.show();
    this.strip.hide();
    const last = conversation.messages.findLast((message) => message.rounds?.length);
    if (last) this.strip.set(last.rounds, last.speed);
    this.toEnd();
    this.actions.changed();
  }

  /** Show all messages; the view of the last one. */
  show() {
    const views = this.conversation.messages.map((message, i) => this.view(message, i));
    this.log.replaceChildren(...views.map((view) => view.element));
    byId("welcome").hidden = views.length > 0;
    return views.at(-1);
  }

  view(message, at) {
    if (message.role === "user") return new UserView(message, { edit: (text) => this.send(text, at) });
    return new AnswerView(message, { retry: () => this.retry(at) });
  }

  /** Ask `text`: at the end, or in the place of message `at` and all that came after it. */
  async send(text, at = this.conversation.messages.length) {
    await this.stop();
    const { messages } = this.conversation;
    if (!this.conversation.title) this.conversation.title = titleOf(text);
    messages.splice(at, messages.length, { role: "user", content: text });
    return this.run();
  }

  /** Ask once more for the answer that is message `at`. */
  async retry(at) {
    await this.stop();
    const [old] = this.conversation.messages.splice(at);
    return this.run(old?.speed ? { speed: old.speed, draft: old.draft } : null);
  }

  /** Stop the answer that is being made, and resolve when it has stopped. What has come of it stays. */
  stop() {
    this.aborter?.abort();
    return this.running ?? Promise.resolve();
  }

  run(before = null) {
    this.running = this.makeAnswer(before).finally(() => (this.running = null));
    return this.running;
  }

  async makeAnswer(before) {
    const { conversation } = this;
    const body = requestFor(conversation);
    const { draft } = conversation.settings;
    const message = { role: "assistant", content: "", reasoning: "", rounds: [], draft, before, pending: true };
    conversation.messages.push(message);
    const view = this.show();
    this.toEnd();
    this.strip.begin();
    this.aborter = new AbortController();
    conversation.updated = Date.now();
    this.keep(conversation);
    this.actions.changed();
    // The button that was pressed may have gone with the old answer.
    if (document.activeElement === document.body) byId("send").focus({ preventScroll: true });
    byId("announce").textContent = "Answering.";
    try {
      await this.follow(body, message, view);
    } catch (error) {
      await this.failed(error, message, body, view);
    }
    this.aborter = null;
    delete message.pending;
    message.rounds = message.rounds.slice(-ROUNDS_KEPT);
    if (conversation === this.conversation) this.strip.set(message.rounds, message.speed);
    view.update();
    view.finish();
    this.follows();
    byId("announce").textContent = message.error ?? `Answer complete, ${totals(message.rounds).tokens} tokens.`;
    conversation.updated = Date.now();
    this.keep(conversation);
    this.actions.changed();
  }

  async failed(error, message, body, view) {
    if (error.name === "AbortError") message.stopped = true;
    else if (!(error instanceof KeyNeeded)) message.error = error.message;
    else if (!(await this.actions.askKey())) message.error = "The server asks for an API key.";
    else {
      this.strip.begin();
      await this.follow(body, message, view).catch((again) => this.failed(again, message, body, view));
    }
  }

  /** Put what the server sends into the message, and show it. */
  async follow(body, message, view) {
    let drafted = false;
    for await (const chunk of answer(body, this.aborter.signal)) {
      const round = chunk.dflash?.round;
      if (round) {
        drafted = round.accepted > 0;
        message.rounds.push([round.tokens, round.drafted, round.accepted]);
        this.strip.add(message.rounds.at(-1));
        message.speed = this.strip.speed; // until the server's own figure comes, at the end
      }
      const [choice] = chunk.choices;
      if (choice) {
        message.content += choice.delta.content ?? "";
        message.reasoning += choice.delta.reasoning_content ?? "";
        message.finish = choice.finish_reason ?? message.finish;
        if (choice.delta.content || choice.delta.reasoning_content) view.update(drafted);
      }
      const [statistics] = chunk.dflash?.answers ?? [];
      if (statistics) message.speed = statistics.generation_tps || null;
      this.follows();
    }
  }

  /** Stay at the end of the page, unless the reader has gone up. */
  follows() {
    if (!this.pinned || this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      if (this.pinned) this.scroller.scrollTop = this.scroller.scrollHeight;
    });
  }

  toEnd() {
    this.pinned = true;
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  keep(conversation = this.conversation) {
    if (!store.save(conversation)) notify("This browser has no room to keep the conversation. Delete an older one.");
  }
}

/** The body of a request for the next answer. */
export function requestFor({ settings, messages }) {
  const { system, model, temperature, top_p, max_tokens, seed, reasoning, draft } = settings;
  const said = system.trim() ? [{ role: "system", content: system }] : [];
  for (const { role, content } of messages) {
    // Two questions follow each other where an answer was stopped before it began; many templates want turns.
    if (role === said.at(-1)?.role) said.at(-1).content += `\n\n${content}`;
    else if (role === "user" || content) said.push({ role, content });
  }
  const body = {
    messages: said,
    stream: true,
    stream_options: { include_usage: true },
    dflash: { draft, rounds: true },
  };
  if (model) body.model = model;
  const numbers = Object.entries({ temperature, top_p, max_tokens, seed });
  for (const [name, value] of numbers) if (value !== null) body[name] = value;
  if (reasoning) body.enable_thinking = reasoning === "on";
  return body;
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 58).trimEnd()} …` : line;
}
