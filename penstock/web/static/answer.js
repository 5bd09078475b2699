// One answer on the page: reasoning, text, tool calls, tokens with their alternatives, ledger.

import { h, fill, copyText } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { ledgerView } from "./ledger.js";

const FINISHES = { length: "ended at the token limit", stopped: "stopped", deadline: "ended by its deadline", abort: "aborted", error: "failed" };

export class AnswerView {
  // `actions`: regenerate(), result(call id, text).
  constructor(model, answer, actions) {
    this.answer = answer;
    this.actions = actions;
    this.showTokens = false;
    this.drawn = {};
    this.text = h("div", { class: "markdown" });
    this.markdown = new MarkdownView(this.text);
    this.reasoningText = h("div", { class: "reasoning-text" });
    this.reasoning = h("details", { class: "reasoning", hidden: true }, h("summary", null, "Reasoning"), this.reasoningText);
    this.tokens = h("div", { class: "tokens", hidden: true });
    this.calls = h("div", { class: "calls" });
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.footer = h("footer");
    this.element = h("article", { class: "answer", "aria-label": `Answer of ${model}`, "aria-busy": "true", data: { model } },
      h("header", null, h("span", { class: "model" }, model), this.state = h("span", { class: "small muted", "aria-live": "polite" })),
      this.reasoning, this.text, this.tokens, this.calls, this.error, this.footer);
    this.draw();
  }

  // At most once a frame, however many tokens come.
  update() {
    this.pending ??= requestAnimationFrame(() => { this.pending = undefined; this.draw(); });
  }

  draw() {
    const { answer, drawn } = this;
    this.element.setAttribute("aria-busy", String(Boolean(answer.running)));
    this.element.classList.toggle("running", Boolean(answer.running));
    this.state.textContent = answer.running ? (answer.content || answer.reasoning ? "writing…" : "waiting for the first token…") : FINISHES[answer.finish] || "";
    if (drawn.content !== answer.content) this.markdown.update(drawn.content = answer.content);
    if (drawn.reasoning !== answer.reasoning) {
      this.reasoning.hidden = !answer.reasoning;
      this.reasoning.open = answer.running && !answer.content;
      this.reasoningText.textContent = drawn.reasoning = answer.reasoning;
    } else if (answer.content && !drawn.closed) {
      drawn.closed = true;
      this.reasoning.open = false;
    }
    this.text.hidden = this.showTokens;
    this.tokens.hidden = !this.showTokens;
    if (this.showTokens) this.drawTokens();
    this.error.hidden = !answer.error;
    if (answer.error && drawn.error !== answer.error) {
      fill(this.error, drawn.error = answer.error,
        answer.needsKey && h("button", { type: "button", class: "tiny", onclick: () => document.dispatchEvent(new Event("askforkeys")) }, "Enter a key"));
    }
    const calls = JSON.stringify(answer.calls);
    if (drawn.calls !== calls) { drawn.calls = calls; this.drawCalls(); }
    const state = `${answer.running} ${Boolean(answer.account)} ${this.showTokens} ${Boolean(answer.tokens?.length)}`;
    if (drawn.state !== state) { drawn.state = state; this.drawFooter(); }
  }

  drawCalls() {
    const { answer } = this;
    fill(this.calls, answer.calls.map((call) => {
      const result = h("textarea", { rows: "2", "aria-label": `Result of ${call.name}`, placeholder: "Result of the call, for the model" });
      return h("section", { class: "call", "aria-label": `Call of ${call.name}` },
        h("h3", null, "Call of ", h("code", null, call.name)),
        h("pre", { tabindex: "0" }, h("code", null, pretty(call.arguments))),
        !answer.running && answer.finish === "tool_calls" && this.actions.result
          && [result, h("button", { type: "button", class: "tiny", onclick: () => this.actions.result(call.id, result.value) }, "Send result")]);
    }));
  }

  drawTokens() {
    const { answer } = this;
    if (this.drawn.tokens > answer.tokens.length) fill(this.tokens);
    for (let index = this.tokens.childElementCount; index < answer.tokens.length; index += 1) this.tokens.append(tokenNode(answer.tokens[index]));
    this.drawn.tokens = answer.tokens.length;
  }

  drawFooter() {
    const { answer } = this;
    if (answer.running) { fill(this.footer); return; }
    const toggle = () => { this.showTokens = !this.showTokens; this.draw(); };
    fill(this.footer,
      answer.account && ledgerView(answer.account),
      h("div", { class: "row" },
        h("button", { type: "button", class: "quiet tiny", onclick: () => copyText(answer.content) }, "Copy"),
        h("button", { type: "button", class: "quiet tiny", onclick: () => this.actions.regenerate() }, "Regenerate"),
        answer.tokens?.length > 0 && h("button", { type: "button", class: "quiet tiny", "aria-pressed": String(this.showTokens), onclick: toggle }, "Tokens")));
  }
}

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

function probability(logprob) {
  const p = Math.exp(logprob);
  return p >= 0.0995 ? `${(100 * p).toFixed(0)}%` : p >= 0.001 ? `${(100 * p).toFixed(1)}%` : "<0.1%";
}

function visible(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
}

// A token with its alternatives, which show when it is pointed at or has the focus.
function tokenNode(token) {
  const sure = Math.exp(token.logprob);
  const others = token.top_logprobs.map((other) => h("tr", { class: other.token === token.token ? "chosen" : "" },
    h("td", { class: "mono" }, visible(other.token)), h("td", { class: "num" }, probability(other.logprob))));
  const node = h("span", { class: `token ${sure > 0.9 ? "sure" : sure > 0.5 ? "likely" : sure > 0.2 ? "unsure" : "doubtful"}`, tabindex: "0" }, token.token,
    h("span", { class: "alternatives", role: "tooltip" }, h("table", null, h("caption", null, `${visible(token.token)} · ${probability(token.logprob)}`), h("tbody", null, others))));
  node.addEventListener("mouseenter", place);
  node.addEventListener("focus", place);
  return node;
}

function place(event) {
  const box = event.currentTarget.lastElementChild;
  const left = event.currentTarget.getBoundingClientRect().left;
  box.style.marginLeft = `${Math.min(0, document.documentElement.clientWidth - left - 200)}px`;
}
