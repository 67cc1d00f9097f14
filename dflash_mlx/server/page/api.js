// Asking the server: the models, and answers as they stream. The key goes with every request, in a header.

const KEY = "dflash-mlx/key";

/** The server wants a key, or another one. */
export class KeyNeeded extends Error {}

/** What the server refused, in its own words. */
export class Refusal extends Error {}

export const key = {
  get value() {
    return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";
  },
  /** For this tab only, or with `remember` until it is forgotten. */
  keep(value, remember) {
    this.forget();
    if (value) (remember ? localStorage : sessionStorage).setItem(KEY, value);
  },
  forget() {
    sessionStorage.removeItem(KEY);
    localStorage.removeItem(KEY);
  },
};

async function ask(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (key.value) headers.Authorization = `Bearer ${key.value}`;
  let response;
  try {
    // Addresses are relative, so that a proxy may serve all of it from a folder.
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The server cannot be reached. Is it running?");
  }
  if (response.status === 401) throw new KeyNeeded();
  if (!response.ok) throw new Refusal(await reason(response));
  return response;
}

async function reason(response) {
  let message = `The server answered with status ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // A proxy's page, perhaps.
  }
  const wait = response.headers.get("retry-after");
  return wait && !message.includes(" s.") ? `${message} Try again in ${wait} s.` : message;
}

export async function models() {
  const found = await (await ask("v1/models")).json();
  return found.data.map((model) => model.id);
}

/** Whether the server drafts, and whether it has begun to answer. */
export async function health() {
  const response = await fetch("health", { cache: "no-store", credentials: "omit" });
  const { mode, ready } = await response.json();
  return { drafts: mode !== "plain", ready };
}

/** The chunks of an answer. Ends early, without an error, when `signal` aborts. */
export async function* answer(body, signal) {
  const response = await ask("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  let ended = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") {
      ended = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refusal(chunk.error.message);
    yield chunk;
  }
  if (!ended) throw new Refusal("The connection ended before the answer did.");
}

/** The data of each server-sent event in a stream of bytes, however it was cut on its way. */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    let end;
    while ((end = held.indexOf("\n\n")) >= 0) {
      const event = held.slice(0, end);
      held = held.slice(end + 2);
      if (event.startsWith("data: ")) yield event.slice(6);
    }
  }
}
