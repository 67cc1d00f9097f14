// Building elements. Text only ever goes in as text: nothing here, or anywhere in the page, parses HTML.

const SVG = "http://www.w3.org/2000/svg";

// Drawn for this page, on a grid of 24 by 24.
const ICONS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  plus: "M12 5v14M5 12h14",
  gear: "M4 7h9m4 0h3M4 17h3m4 0h9M15 4.5v5M9 14.5v5",
  pencil: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13M10 11v5M14 11v5",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  upload: "M12 15V4M7 9l5-5 5 5M5 20h14",
  copy: "M9 9h10v11H9zM15 9V4H5v11h4",
  retry: "M19 12a7 7 0 1 1-2.2-5.1M19 3v5h-5",
  send: "M12 20V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  down: "M12 5v14M6 13l6 6 6-6",
  close: "M6 6l12 12M18 6L6 18",
  auto: "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18",
  light: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 2v3M12 19v3M2 12h3M19 12h3M5 5l2 2M17 17l2 2M5 19l2-2M17 7l2-2",
  dark: "M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5z",
};

/** An element: `on` has listeners, `text` its text, and everything else is an attribute (false and null: none). */
export function h(tag, { on = {}, text, ...attributes } = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  for (const [event, listener] of Object.entries(on)) element.addEventListener(event, listener);
  if (text !== undefined) element.textContent = text;
  element.append(...children.filter((child) => child != null));
  return element;
}

export function svg(tag, attributes = {}) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

export function icon(name) {
  const drawing = svg("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" });
  drawing.append(svg("path", { d: ICONS[name] }));
  return drawing;
}

/** A button with an icon; without a visible `text`, `label` names it. */
export function button(name, { label, text, ...rest }, click) {
  const attributes = { type: "button", "aria-label": text ? null : label, title: text ? null : label, ...rest };
  const made = h("button", { ...attributes, on: { click } }, name ? icon(name) : null);
  if (text) made.append(h("span", { text }));
  return made;
}

export const byId = (id) => document.getElementById(id);

let noticeTimer = 0;

/** A line at the foot of the page for a few seconds, with something to press where `action` is given. */
export function notify(text, action = null) {
  const notice = byId("notice");
  clearTimeout(noticeTimer);
  notice.replaceChildren(h("span", { text }));
  if (action) {
    const press = () => {
      notice.hidden = true;
      action.press();
    };
    notice.append(h("button", { type: "button", text: action.text, on: { click: press } }));
  }
  notice.hidden = false;
  noticeTimer = setTimeout(() => (notice.hidden = true), action ? 10000 : 5000);
}

/** Copy a text; the button says for a moment that it did. */
export async function copyText(text, pressed) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Over plain HTTP from another machine, browsers have no clipboard for pages.
    const area = h("textarea", { class: "hidden-visually", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    pressed.focus();
  }
  const label = pressed.querySelector("span");
  const before = label.textContent;
  label.textContent = "Copied";
  setTimeout(() => (label.textContent = before === "Copied" ? "Copy" : before), 1500);
}
