// Conversations, in this browser only: each has an entry of its own in localStorage, so that two tabs do not overwrite
// each other's.

const PREFIX = "dflash-mlx/conversation/";
const LAST = "dflash-mlx/settings"; // what a new conversation begins with

export const DEFAULTS = {
  model: "",
  system: "",
  temperature: null, // null: as the server has it
  top_p: null,
  max_tokens: null,
  seed: null,
  reasoning: "", // "": as the model has it; "on"; "off"
  draft: true,
};

const removed = new Set();

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null; // damaged, or not ours
  }
}

const read = (name) => parse(localStorage.getItem(name));

export function newConversation() {
  const now = Date.now();
  const settings = { ...DEFAULTS, ...read(LAST) };
  const id = `${now.toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
  return { version: 1, id, title: "", created: now, updated: now, settings, messages: [] };
}

export function load(id) {
  const found = read(PREFIX + id);
  if (!found || !Array.isArray(found.messages)) return null;
  return { ...found, settings: { ...DEFAULTS, ...found.settings } };
}

/** Keep a conversation. False when the browser has no room left or keeps nothing. */
export function save(conversation) {
  if (removed.has(conversation.id)) return true; // an answer that was still being made
  try {
    localStorage.setItem(LAST, JSON.stringify({ ...conversation.settings, system: "" }));
    if (conversation.messages.length) {
      localStorage.setItem(
        PREFIX + conversation.id,
        JSON.stringify(conversation, (name, value) => (name === "pending" ? undefined : value)),
      );
    }
    return true;
  } catch {
    return false;
  }
}

export function remove(id) {
  removed.add(id);
  localStorage.removeItem(PREFIX + id);
}

export function restore(conversation) {
  removed.delete(conversation.id);
  save(conversation);
}

/** All of them, the one that was used last first: id, title, updated. */
export function list() {
  return Object.keys(localStorage)
    .filter((name) => name.startsWith(PREFIX))
    .map((name) => load(name.slice(PREFIX.length)))
    .filter(Boolean)
    .map(({ id, title, updated }) => ({ id, title, updated }))
    .sort((a, b) => b.updated - a.updated);
}

/** Call `changed` when another tab has changed them. */
export function watch(changed) {
  addEventListener("storage", (event) => {
    if (event.key === null || event.key.startsWith(PREFIX)) changed();
  });
}

/** A new conversation with what `download` has written; null for any other text. */
export function fromFile(text) {
  const { title, messages, settings } = parse(text) ?? {};
  if (typeof title !== "string" || !Array.isArray(messages)) return null;
  if (!messages.length || !messages.every(isMessage)) return null;
  const made = { ...newConversation(), title, messages };
  for (const [name, standard] of Object.entries(DEFAULTS))
    if (fits(settings?.[name], standard)) made.settings[name] = settings[name];
  return made;
}

/** Whether a setting's value is of the kind of its default; where that is null, numbers are. */
function fits(value, standard) {
  return standard === null ? value === null || typeof value === "number" : typeof value === typeof standard;
}

function isMessage(message) {
  const { role, content, reasoning = "", rounds = [], speed = 0, error = "", before, pending } = message ?? {};
  return (
    (role === "user" || role === "assistant") &&
    [content, reasoning, error].every((text) => typeof text === "string") &&
    [speed, before?.speed].every((number) => number == null || typeof number === "number") &&
    Array.isArray(rounds) &&
    rounds.every((round) => Array.isArray(round) && round.length === 3 && round.every(Number.isFinite)) &&
    pending === undefined
  );
}

/** The conversation as a file. */
export function download(conversation) {
  const file = new Blob([JSON.stringify(conversation, null, 2)], { type: "application/json" });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(file);
  const name = (conversation.title || "conversation")
    .toLowerCase()
    .replace(/[^\p{L}\p{N}]+/gu, "-")
    .slice(0, 40);
  link.download = `${name.replace(/^-|-$/g, "") || "conversation"}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
