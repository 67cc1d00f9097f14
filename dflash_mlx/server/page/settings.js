// The dialogs for settings and for the key, and the switch between light and dark.

import { key } from "./api.js";
import { button, byId, icon } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const THEMES = { auto: "Colours: the system’s", light: "Colours: light", dark: "Colours: dark" };
const THEME = "dflash-mlx/theme";

export class SettingsDialog {
  /** actions: settings() is the object to read and to write, changed() after each change, askKey(). */
  constructor(actions) {
    this.actions = actions;
    this.dialog = byId("settings");
    this.fields = this.dialog.querySelector("form").elements;
    byId("settings-slot").replaceWith(button("gear", { label: "Settings", id: "open-settings" }, () => this.open()));
    byId("settings-close-slot").replaceWith(button("close", { label: "Close" }, () => this.dialog.close()));
    for (const event of ["input", "change"]) this.dialog.addEventListener(event, () => this.read());
    this.dialog.addEventListener("submit", (event) => {
      event.preventDefault(); // Enter in a field
      this.dialog.close();
    });
    closeOutside(this.dialog);
    byId("change-key").addEventListener("click", () => {
      this.dialog.close();
      actions.askKey();
    });
    byId("forget-key").addEventListener("click", () => {
      key.forget();
      this.showKey();
    });
  }

  setModels(names) {
    this.fields.model.replaceChildren(...names.map((name) => new Option(name, name)));
  }

  open() {
    const settings = this.actions.settings();
    for (const [name, value] of Object.entries(settings)) if (this.fields[name]) this.fields[name].value = value ?? "";
    this.showKey();
    this.dialog.showModal();
  }

  read() {
    const settings = this.actions.settings();
    for (const name of NUMBERS) {
      const field = this.fields[name];
      const valid = field.value !== "" && field.validity.valid;
      field.setAttribute("aria-invalid", String(!field.validity.valid));
      settings[name] = valid ? Number(field.value) : null;
    }
    for (const name of ["model", "system", "reasoning"]) settings[name] = this.fields[name].value;
    this.actions.changed();
  }

  showKey() {
    const text = key.value
      ? "A key is kept and sent with every request."
      : "No key is kept. A server without one needs none.";
    byId("key-state").textContent = text;
    byId("forget-key").disabled = !key.value;
  }
}

/** Ask for the key; resolves to whether one was given. */
export function askForKey() {
  const dialog = byId("key-dialog"),
    input = byId("key-input");
  byId("key-hint").hidden = false;
  byId("key-title").textContent = key.value ? "The server refused this key" : "This server asks for a key";
  input.value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    let given = false;
    dialog.querySelector("form").onsubmit = (event) => {
      event.preventDefault();
      key.keep(input.value.trim(), byId("key-remember").checked);
      given = true;
      dialog.close();
    };
    byId("key-cancel").onclick = () => dialog.close();
    dialog.onclose = () => resolve(given);
  });
}

export function themeButton() {
  const pressed = button("auto", { text: THEMES.auto, id: "theme" }, () => {
    const names = Object.keys(THEMES);
    show(names[(names.indexOf(current()) + 1) % names.length]);
  });
  const current = () => document.documentElement.dataset.theme ?? "auto";
  const show = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    try {
      if (theme === "auto") localStorage.removeItem(THEME);
      else localStorage.setItem(THEME, theme);
    } catch {
      // Then it holds until the page is closed.
    }
    pressed.replaceChildren(icon(theme), document.createElement("span"));
    pressed.lastChild.textContent = THEMES[theme];
  };
  byId("theme-slot").append(pressed);
  show(current());
}

function closeOutside(dialog) {
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
}
