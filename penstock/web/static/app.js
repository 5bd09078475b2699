// The shell: pages by the address's hash, theme, keys, keyboard shortcuts.

import { h, fill, openDialog, toast } from "./dom.js";
import { key, setKey } from "./api.js";
import { chatPage } from "./chat.js";
import { livePage } from "./live.js";
import { adminPage } from "./admin.js";

const PAGES = { chat: chatPage, live: livePage, admin: adminPage };
const main = document.getElementById("main");
let current = null; // { name, leave?, shortcuts? } of the page that is shown

function show() {
  const [name, detail] = (location.hash.slice(1) || "chat").split("/");
  const page = PAGES[name] ? name : "chat";
  if (current?.name === page) {
    current.goTo?.(detail);
    return;
  }
  current?.leave?.();
  for (const link of document.querySelectorAll("nav [data-page]")) {
    if (link.dataset.page === page) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${page[0].toUpperCase()}${page.slice(1)} · Penstock`;
  fill(main);
  main.className = `page-${page}`;
  current = { name: page, ...PAGES[page](main, detail) };
}

// ------------------------------------------------------------ theme

const THEMES = { "": ["◐", "as the system"], light: ["☀", "light"], dark: ["☾", "dark"] };
const themeButton = document.getElementById("theme-button");

function applyTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  themeButton.textContent = THEMES[theme][0];
  themeButton.setAttribute("aria-label", `Theme: ${THEMES[theme][1]}`);
  themeButton.title = `Theme: ${THEMES[theme][1]}`;
  document.dispatchEvent(new Event("themechange"));
}

function nextTheme() {
  const names = Object.keys(THEMES);
  const theme = names[(names.indexOf(localStorage.getItem("penstock.theme") || "") + 1) % names.length];
  localStorage.setItem("penstock.theme", theme);
  applyTheme(theme);
}

// ------------------------------------------------------------ keys

function keyField(kind, title, about) {
  return h("label", { class: "field" }, title,
    h("input", { type: "password", name: kind, value: key(kind), autocomplete: "off", spellcheck: "false", placeholder: "psk-…" }),
    h("span", { class: "small" }, about));
}

async function askForKeys() {
  const saved = await openDialog("Keys", (close) => h("form", { class: "stack", onsubmit: (event) => {
    event.preventDefault();
    for (const kind of ["tenant", "admin"]) setKey(kind, event.target.elements[kind].value.trim());
    close(true);
  } },
  keyField("tenant", "Tenant's key", "For Chat, where the server has tenants: penstock keys create NAME"),
  keyField("admin", "Admin key", "For Admin, and for Live where the server has tenants: penstock keys create --admin"),
  h("p", { class: "small muted" }, "Keys stay in this browser tab and are sent to this server only."),
  h("div", { class: "buttons" },
    h("button", { type: "button", onclick: () => close(false) }, "Cancel"),
    h("button", { type: "submit", class: "primary" }, "Save"))));
  if (saved) {
    toast("Keys saved for this tab");
    document.dispatchEvent(new Event("keychange"));
  }
}

// ------------------------------------------------------------ shortcuts

const SHORTCUTS = {
  1: ["Chat", () => { location.hash = "chat"; }],
  2: ["Live", () => { location.hash = "live"; }],
  3: ["Admin", () => { location.hash = "admin"; }],
  t: ["Change the theme", nextTheme],
  k: ["Enter keys", askForKeys],
  "?": ["Show this list", showHelp],
};

function showHelp() {
  const list = (title, shortcuts) => [h("h2", null, title),
    Object.entries(shortcuts).map(([name, [about]]) => [h("span", null, name.split(" ").map((part) => h("kbd", null, part))), h("span", null, about)])];
  openDialog("Keyboard shortcuts", (close) => [
    h("div", { class: "keys-list" }, list("Everywhere", SHORTCUTS),
      current?.shortcuts && list(current.name[0].toUpperCase() + current.name.slice(1), { ...current.typed, ...current.shortcuts })),
    h("div", { class: "buttons" }, h("button", { type: "button", autofocus: true, onclick: () => close() }, "Close")),
  ]);
}

function isTyping(target) {
  return target.matches?.("input:not([type=checkbox],[type=range]), textarea, select, [contenteditable]");
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const name = event.key === " " ? "Space" : event.key;
  if (isTyping(event.target) && name !== "Escape") return;
  if (name === "Space" && event.target.matches?.("button, summary, a, input")) return;
  const found = current?.shortcuts?.[name] || SHORTCUTS[name];
  if (found) {
    event.preventDefault();
    found[1]();
  }
});

document.getElementById("key-button").addEventListener("click", askForKeys);
document.addEventListener("askforkeys", askForKeys);
themeButton.addEventListener("click", nextTheme);
document.getElementById("help-button").addEventListener("click", showHelp);
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("themechange")));
window.addEventListener("hashchange", show);
applyTheme(THEMES[localStorage.getItem("penstock.theme")] ? localStorage.getItem("penstock.theme") : "");
show();
