// The page: puts its parts together.

import { health, KeyNeeded, models } from "./api.js";
import { Chat } from "./chat.js";
import { button, byId, h, icon, notify } from "./dom.js";
import { grow } from "./messages.js";
import { askForKey, SettingsDialog, themeButton } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import * as store from "./store.js";

const EXAMPLES = [
  "Why is the sky blue?",
  "Write a Python function that checks whether a string is a palindrome.",
  "Compare tea and coffee in a table.",
];

const input = byId("input");
const draftSwitch = byId("draft");
let served = [];
let ready = true;

const chat = new Chat({ askKey, changed });
const first = () =>
  store
    .list()
    .slice(0, 1)
    .map(({ id }) => store.load(id))[0] ?? store.newConversation();
byId("newest-slot").replaceWith(
  button("down", { label: "Go to the end", id: "newest", hidden: true }, () => chat.toEnd()),
);
const sendButton = button("send", { label: "Send", id: "send", class: "primary" }, () =>
  chat.busy ? chat.stop() : send(),
);
byId("send-slot").replaceWith(sendButton);
chat.conversation = first();

const sidebar = new Sidebar({
  current: () => chat.conversation,
  open: (id) => open(store.load(id) ?? store.newConversation()),
  startNew: () => open(store.newConversation()),
  add: (conversation) => {
    open(conversation);
    chat.keep();
    changed();
  },
  rename: (id, title) => {
    chat.conversation.title = title;
    chat.keep();
    changed();
  },
});
const settings = new SettingsDialog({ settings: () => chat.conversation.settings, changed: settingsChanged, askKey });

async function askKey() {
  const given = await askForKey();
  if (given && !served.length) await start();
  return given;
}

function open(conversation) {
  chat.open(conversation);
  chooseModel();
  if (!sidebar.isOpen) input.focus();
}

/** The server may serve another model than it did when the conversation began. */
function chooseModel() {
  const { settings: chosen } = chat.conversation;
  if (served.length && !served.includes(chosen.model)) chosen.model = served[0];
}

/** Show what depends on the conversation and on whether an answer is being made. */
function changed() {
  const { conversation, busy } = chat;
  const title = conversation.title || "New conversation";
  byId("title").textContent = title;
  document.title = conversation.title ? `${title} – dflash-mlx` : "dflash-mlx";
  document.body.classList.toggle("busy", busy);
  const label = busy ? "Stop" : "Send";
  sendButton.replaceChildren(icon(busy ? "stop" : "send"));
  sendButton.setAttribute("aria-label", label);
  sendButton.title = busy ? "Stop (Esc)" : "Send (Enter)";
  draftSwitch.setAttribute("aria-checked", String(conversation.settings.draft && !draftSwitch.disabled));
  const { model } = conversation.settings;
  const state = ready ? "conversations stay in this browser" : "the server measures this machine first, then it answers";
  byId("model-line").textContent = served.length ? `${model} · ${state}` : "";
  sidebar.show();
}

function settingsChanged() {
  chat.keep();
  changed();
}

function send() {
  const text = input.value.trim();
  if (!text || chat.busy) return;
  input.value = "";
  grow(input);
  chat.send(text);
}

function typed(event) {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && !input.value && !chat.busy) {
    const edits = document.querySelectorAll(".message.user .actions button:first-child");
    if (edits.length) event.preventDefault();
    [...edits].at(-1)?.click();
  }
}

function pressed(event) {
  if (document.querySelector("dialog[open]")) return;
  const typing = /^(?:INPUT|TEXTAREA|SELECT)$/.test(event.target.nodeName);
  if (event.key === "Escape" && chat.busy) {
    event.preventDefault();
    chat.stop();
  } else if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    input.focus();
  }
}

/** Ask the server what it serves; with a key where it wants one. */
async function start() {
  try {
    served = await models();
    settings.setModels(served);
    chooseModel();
  } catch (error) {
    if (error instanceof KeyNeeded) {
      if (await askForKey()) await start();
      return;
    }
    notify(error.message);
  }
  await look();
}

/** See what state the server is in, again and again until it answers. */
async function look() {
  const state = await health().catch(() => ({ drafts: true, ready: true }));
  ready = state.ready;
  draftSwitch.disabled = !state.drafts;
  draftSwitch.title = state.drafts ? "" : "The server was started without a drafter.";
  changed();
  if (!ready) setTimeout(look, 1000);
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
input.addEventListener("keydown", typed);
input.addEventListener("input", () => grow(input));
addEventListener("keydown", pressed);
draftSwitch.addEventListener("click", () => {
  chat.conversation.settings.draft = !chat.conversation.settings.draft;
  settingsChanged();
});
byId("examples").append(
  ...EXAMPLES.map((text) => h("button", { type: "button", text, on: { click: () => chat.send(text) } })),
);
themeButton();
open(chat.conversation);
start();
