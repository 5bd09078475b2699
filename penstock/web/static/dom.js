// Building DOM nodes. Text is always a text node: nothing on this page is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, props, ...children) {
  return build(document.createElement(tag), props, children);
}

export function svg(tag, props, ...children) {
  return build(document.createElementNS(SVG, tag), props, children);
}

function build(node, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "style") Object.assign(node.style, value);
    else if (name === "value") node.value = value;
    else if (name === "checked") node.checked = true;
    else node.setAttribute(name, value === true ? "" : value);
  }
  add(node, children);
  return node;
}

function add(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child !== undefined && child !== null && child !== false) node.append(child);
  }
}

export function fill(node, ...children) {
  node.replaceChildren();
  add(node, children);
  return node;
}

export function toast(text) {
  const note = h("div", null, text);
  document.getElementById("toasts").append(note);
  setTimeout(() => note.remove(), 5000);
}

// A modal dialog that is removed when it closes. Resolves with what close(value) was given; undefined after Escape.
export function openDialog(title, body, { wide = false } = {}) {
  return new Promise((resolve) => {
    let result;
    const box = h("dialog", { class: wide ? "wide" : "", "aria-label": title });
    const close = (value) => { result = value; box.close(); };
    fill(box, h("h1", null, title), body(close));
    box.addEventListener("close", () => { box.remove(); resolve(result); });
    box.addEventListener("click", (event) => { if (event.target === box) box.close(); });
    document.body.append(box);
    box.showModal();
  });
}

export function confirmed(title, text, action) {
  return openDialog(title, (close) => [
    h("p", null, text),
    h("div", { class: "buttons" },
      h("button", { type: "button", onclick: () => close(false) }, "Cancel"),
      h("button", { type: "button", class: "danger", autofocus: true, onclick: () => close(true) }, action)),
  ]);
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    toast("Copied");
  } catch {
    toast("The browser did not allow copying");
  }
}

// ------------------------------------------------------------ numbers for people

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 0.9995) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return seconds < 86400 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} d`;
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(value < 1e7 ? 2 : 1)} M`;
  return value >= 1e4 ? `${(value / 1e3).toFixed(value < 1e5 ? 1 : 0)} k` : String(Math.round(value));
}

export function rate(value) {
  return value < 10 ? value.toFixed(1) : count(value);
}

export function percent(part, whole) {
  return whole > 0 ? `${(100 * part / whole).toFixed(part / whole < 0.0995 ? 1 : 0)}%` : "–";
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  return value < 2 ** 20 ? `${(value / 1024).toFixed(0)} KiB` : `${(value / 2 ** 20).toFixed(1)} MiB`;
}

export function money(value) {
  return value === 0 ? "0" : value >= 0.01 ? value.toFixed(2) : value.toPrecision(2);
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
}
