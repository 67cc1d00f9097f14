// The list of conversations: open, rename, export, import, delete.

import { button, byId, h, notify } from "./dom.js";
import * as store from "./store.js";

const narrow = matchMedia("(max-width: 760px)");

export class Sidebar {
  /** actions: current() is the open conversation, open(id), startNew(), rename(id, title), add(conversation). */
  constructor(actions) {
    this.actions = actions;
    this.element = byId("sidebar");
    this.menu = button("menu", { label: "Conversations", id: "menu", "aria-controls": "sidebar" }, () => this.toggle());
    byId("menu-slot").replaceWith(this.menu);
    byId("close-slot").replaceWith(button("close", { label: "Close", id: "close-sidebar" }, () => this.toggle(false)));
    const start = () => {
      this.toggle(false);
      actions.startNew();
    };
    byId("new-slot").replaceWith(button("plus", { text: "New conversation", id: "new" }, start));
    const file = h("input", { type: "file", accept: ".json", hidden: true, on: { change: () => this.import(file) } });
    const choose = button("upload", { text: "Import a conversation", id: "import" }, () => file.click());
    byId("import-slot").replaceWith(choose, file);
    byId("shade").addEventListener("click", () => this.toggle(false));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.isOpen) {
        event.stopPropagation();
        this.toggle(false);
      }
    });
    narrow.addEventListener("change", () => this.toggle(false));
    store.watch(() => this.show());
    this.toggle(false);
    this.show();
  }

  /** On a narrow screen the list lies over the page, and is out of reach while it is closed. */
  toggle(open = !this.isOpen) {
    const wasOpen = this.isOpen;
    this.isOpen = open && narrow.matches;
    this.element.classList.toggle("open", this.isOpen);
    this.element.inert = narrow.matches && !this.isOpen;
    document.querySelector("main").inert = this.isOpen;
    byId("shade").hidden = !this.isOpen;
    this.menu.setAttribute("aria-expanded", String(this.isOpen));
    if (this.isOpen) byId("close-sidebar").focus();
    else if (wasOpen) this.menu.focus();
  }

  show() {
    const items = store.list();
    byId("conversations").replaceChildren(...items.map((item) => this.item(item)));
    byId("no-conversations").hidden = items.length > 0;
  }

  item({ id, title }) {
    const current = this.actions.current().id === id;
    const open = () => {
      this.toggle(false);
      this.actions.open(id);
    };
    const opener = h("button", {
      type: "button",
      class: "open",
      "aria-current": current ? "true" : null,
      text: title,
      on: { click: open },
    });
    const row = h("li", {}, opener);
    if (current) {
      row.append(
        button("pencil", { label: "Rename" }, () => this.rename(row, id)),
        button("download", { label: "Export as JSON" }, () => store.download(store.load(id))),
        button("trash", { label: "Delete" }, () => this.remove(id)),
      );
    }
    return row;
  }

  rename(row, id) {
    const input = h("input", { "aria-label": "Name of the conversation", maxlength: "120" });
    input.value = this.actions.current().title;
    let done = false;
    const finish = (keep) => {
      if (done) return;
      done = true;
      if (keep && input.value.trim()) this.actions.rename(id, input.value.trim());
      this.show();
      this.element.querySelector("[aria-current]")?.focus();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) finish(true);
      if (event.key !== "Escape") return;
      event.stopPropagation();
      finish(false);
    });
    input.addEventListener("blur", () => finish(true));
    row.replaceChildren(input);
    input.focus();
    input.select();
  }

  async import(input) {
    const [file] = input.files;
    const text = await file.text();
    input.value = ""; // the same file may be chosen again
    const conversation = store.fromFile(text);
    if (!conversation) return notify(`${file.name} is not a conversation that this page has exported.`);
    this.toggle(false);
    this.actions.add(conversation);
  }

  remove(id) {
    const removed = store.load(id);
    store.remove(id);
    this.actions.startNew();
    const press = () => {
      store.restore(removed);
      this.actions.open(id);
    };
    notify(`“${removed.title}” was deleted.`, { text: "Undo", press });
  }
}
