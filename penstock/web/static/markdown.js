// Markdown to DOM nodes. What a model writes is text: HTML in it is shown, links lead to http, https and mailto only.

import { h, copyText } from "./dom.js";
import { highlight } from "./highlight.js";

const MAX_INLINE = 8000; // characters of a paragraph with markup; a longer one is shown as it is
const MAX_DEPTH = 6; // of lists and quotes within each other

const FENCE = /^( {0,3})(```+|~~~+)\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_RULE = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

const INLINE = new RegExp([
  String.raw`\\([\\\x60*_{}\[\]()#+\-.!~|<>])`,                       // 1 escape
  "(`+)([\\s\\S]*?[^`])\\2(?!`)",                                     // 2, 3 code
  String.raw`(\*\*|(?<!\w)__)(?=\S)([\s\S]*?\S)\4(?!\w*_)`,           // 4, 5 strong
  String.raw`(\*|(?<!\w)_)(?=[^\s*_])([\s\S]*?[^\s*])\6(?![\w*])`,    // 6, 7 emphasis
  String.raw`~~(?=\S)([\s\S]*?\S)~~`,                                 // 8 deleted
  String.raw`!?\[([^\]]*)\]\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)(?:\s+"[^"]*")?\)`, // 9, 10 link
  String.raw`(https?:\/\/[^\s<>"]*[^\s<>".,;:!?')\]])`,               // 11 bare link
  "( {2,}\\n|\\n)",                                                   // 12 line break
].join("|"), "g");

// One element whose content follows a growing text: only blocks that changed are made again.
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.sources = [];
  }

  update(text) {
    const found = blocks(text.split("\n"));
    const { element, sources } = this;
    let same = 0;
    while (same < sources.length && same < found.length && sources[same] === found[same].source) same += 1;
    while (element.childNodes.length > same) element.lastChild.remove();
    for (const block of found.slice(same)) element.append(render(block, 0));
    this.sources = found.map((block) => block.source);
  }
}

export function blocks(lines) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) { at += 1; continue; }
    const start = at;
    const block = take(lines, at);
    at = block.end;
    block.source = lines.slice(start, at).join("\n");
    found.push(block);
  }
  return found;
}

function take(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return takeFence(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return { kind: "heading", level: heading[1].length, text: heading[2], end: at + 1 };
  if (RULE.test(line)) return { kind: "rule", end: at + 1 };
  if (QUOTE.test(line)) {
    const inner = [];
    let end = at;
    for (; end < lines.length && QUOTE.test(lines[end]); end += 1) inner.push(QUOTE.exec(lines[end])[1]);
    return { kind: "quote", inner, end };
  }
  if (ITEM.test(line)) return takeList(lines, at);
  if (line.includes("|") && at + 1 < lines.length && TABLE_RULE.test(lines[at + 1]) && lines[at + 1].includes("-")) {
    let end = at + 2;
    while (end < lines.length && lines[end].includes("|") && lines[end].trim()) end += 1;
    return { kind: "table", rows: [line, ...lines.slice(at + 2, end)].map(cells), align: cells(lines[at + 1]).map(alignment), end };
  }
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines[end])) end += 1;
  return { kind: "paragraph", text: lines.slice(at, end).join("\n"), end };
}

function interrupts(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function takeFence(lines, at, [, indent, mark, language]) {
  const closing = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).map((line) => (line.startsWith(indent) ? line.slice(indent.length) : line)).join("\n");
  return { kind: "code", text, language: language.toLowerCase(), end: Math.min(end + 1, lines.length) };
}

function takeList(lines, at) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (item && item[1].length <= indent.length + 1 && /\d/.test(item[2]) === ordered) {
      items.push([item[3]]);
    } else if (items.length && (lines[end].startsWith(`${indent}  `) || lines[end].startsWith(`${indent}\t`))) {
      items.at(-1).push(lines[end].slice(indent.length).replace(/^ {1,4}|^\t/, ""));
    } else if (!lines[end].trim() && end + 1 < lines.length && (lines[end + 1].startsWith(`${indent}  `) || ITEM.test(lines[end + 1]))) {
      items.at(-1).push("");
    } else if (item || !lines[end].trim() || interrupts(lines[end])) {
      break;
    } else {
      items.at(-1).push(lines[end].trim());
    }
    end += 1;
  }
  return { kind: "list", ordered, start: ordered ? parseInt(mark, 10) : 1, items, end };
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function alignment(rule) {
  return rule.endsWith(":") ? (rule.startsWith(":") ? "center" : "right") : "left";
}

function render(block, depth) {
  switch (block.kind) {
    case "heading": return h(`h${Math.min(6, block.level + 2)}`, null, inline(block.text));
    case "rule": return h("hr");
    case "code": return codeBlock(block.text, block.language);
    case "quote": return h("blockquote", null, nested(block.inner, depth));
    case "list": return h(block.ordered ? "ol" : "ul", { start: block.ordered && block.start !== 1 ? block.start : null },
      block.items.map((lines) => h("li", null, itemContent(lines, depth))));
    case "table": return h("div", { class: "scroll" }, table(block));
    default: return h("p", null, inline(block.text));
  }
}

function nested(lines, depth) {
  return depth < MAX_DEPTH ? blocks(lines).map((block) => render(block, depth + 1)) : lines.join("\n");
}

function itemContent(lines, depth) {
  if (lines.length === 1) return inline(lines[0]);
  const [first, ...rest] = depth < MAX_DEPTH ? blocks(lines) : [{ kind: "paragraph", text: lines.join("\n") }];
  if (!first) return [];
  const head = first.kind === "paragraph" ? inline(first.text) : render(first, depth + 1);
  return [head, rest.map((block) => render(block, depth + 1))];
}

function table({ rows: [head, ...body], align }) {
  const cell = (tag) => (text, index) => h(tag, { style: { textAlign: align[index] || "left" } }, inline(text));
  return h("table", null,
    h("thead", null, h("tr", null, head.map(cell("th")))),
    h("tbody", null, body.map((row) => h("tr", null, row.map(cell("td"))))));
}

function codeBlock(text, language) {
  return h("figure", { class: "code" },
    h("figcaption", null, h("span", null, language || "text"),
      h("button", { type: "button", class: "quiet tiny", onclick: () => copyText(text) }, "Copy")),
    h("pre", { tabindex: "0" }, h("code", null, highlight(text, language))));
}

export function inline(text, depth = 0) {
  if (text.length > MAX_INLINE || depth > MAX_DEPTH) return [text];
  const nodes = [];
  let last = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > last) nodes.push(text.slice(last, match.index));
    last = match.index + match[0].length;
    nodes.push(inlineNode(match, depth + 1));
  }
  if (last < text.length) nodes.push(text.slice(last));
  return nodes;
}

function inlineNode(match, depth) {
  const [whole, escaped, , code, , strong, , emphasis, deleted, label, target, bare, newline] = match;
  if (escaped) return escaped;
  if (code !== undefined) return h("code", null, code.replace(/^ (.*) $/s, "$1"));
  if (strong) return h("strong", null, inline(strong, depth));
  if (emphasis) return h("em", null, inline(emphasis, depth));
  if (deleted) return h("del", null, inline(deleted, depth));
  if (target !== undefined) return link(target, label) || whole;
  if (bare) return link(bare, bare) || whole;
  return newline.length > 1 ? h("br") : "\n";
}

function link(target, label) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return null;
  return h("a", { href: target, target: "_blank", rel: "noopener noreferrer nofollow" }, label || target);
}
