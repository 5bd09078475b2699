// The chat page: conversations, one or several models side by side, parameters.

import { h, fill, toast, confirmed } from "./dom.js";
import { json, explain, ApiError } from "./api.js";
import { newConversation, conversations, save, remove, removeAll } from "./history.js";
import { newAnswer, generate } from "./generate.js";
import { AnswerView } from "./answer.js";
import { parameterPanel } from "./parameters.js";

const MAX_MODELS = 4;

let page; // kept while other pages are shown, so that answers go on

export function chatPage(main) {
  page ??= new ChatPage();
  main.append(page.layout);
  page.loadModels();
  page.toEnd(true);
  return {
    typed: { Enter: ["Send"], "Shift Enter": ["New line"] },
    shortcuts: {
      "/": ["Write a message", () => page.input.focus()],
      n: ["New conversation", () => page.open(newConversation(page.conversation))],
      r: ["Regenerate the last answers", () => page.regenerateLast()],
      e: ["Edit the last message", () => page.editLast()],
      p: ["Parameters", () => page.toggle("parameters")],
      h: ["History", () => page.toggle("history")],
      Escape: ["Stop", () => page.stop()],
    },
  };
}

class ChatPage {
  constructor() {
    this.cards = [];
    this.controllers = new Set();
    this.input = h("textarea", { id: "message", rows: "1", "aria-label": "Message", placeholder: "Write a message", oninput: () => this.fit(), onkeydown: (event) => this.typed(event) });
    this.sendButton = h("button", { type: "submit", class: "primary" }, "Send");
    this.stopButton = h("button", { type: "button", hidden: true, onclick: () => this.stop() }, "Stop");
    this.transcript = h("div", { class: "transcript", role: "log", "aria-label": "Conversation" });
    this.history = h("aside", { class: "history", "aria-label": "History", id: "history" });
    this.parameters = h("aside", { class: "parameters", "aria-label": "Parameters", id: "parameters" });
    this.models = h("div", { class: "row models", role: "group", "aria-label": "Models" });
    this.buttons = {
      history: h("button", { type: "button", class: "quiet tiny", "aria-controls": "history", "aria-expanded": "false", onclick: () => this.toggle("history") }, "History"),
      parameters: h("button", { type: "button", class: "quiet tiny", "aria-controls": "parameters", "aria-expanded": "false", onclick: () => this.toggle("parameters") }, "Parameters"),
    };
    this.layout = h("div", { class: "chat" }, this.history,
      h("section", { class: "conversation", "aria-label": "Chat" },
        h("div", { class: "bar" }, this.buttons.history, this.models, this.buttons.parameters),
        this.scroller = h("div", { class: "scroller", tabindex: "-1" }, this.transcript),
        h("form", { class: "composer", onsubmit: (event) => { event.preventDefault(); this.submit(); } },
          h("div", { class: "composer-box" }, this.input, this.stopButton, this.sendButton))),
      this.parameters);
    const wide = matchMedia("(min-width: 1000px)");
    if (wide.matches) this.toggle("history");
    wide.addEventListener("change", () => this.closeDrawers()); // which would cover the answer in a narrow window
    this.open(conversations()[0] || newConversation());
    document.addEventListener("keychange", () => this.loadModels());
    addEventListener("pagehide", () => { if (this.controllers.size) save(this.conversation); });
  }

  async loadModels() {
    try {
      this.cards = (await json("/v1/models")).data.filter(({ task }) => task === "generate");
      const names = this.cards.map((card) => card.id);
      const kept = this.conversation.models.filter((name) => names.includes(name));
      this.conversation.models = kept.length ? kept : names.slice(0, 1);
      this.problem = null;
    } catch (error) {
      this.problem = error;
    }
    this.drawModels();
    this.drawParameters();
    if (!this.conversation.turns.length) this.drawTurns();
  }

  // ------------------------------------------------------------ drawing

  open(conversation) {
    this.stop();
    this.conversation = conversation;
    if (!conversation.models.length) conversation.models = this.cards.slice(0, 1).map((card) => card.id);
    for (const turn of conversation.turns) for (const answer of Object.values(turn.answers)) answer.running = false;
    this.drawHistory();
    this.drawModels();
    this.drawParameters();
    this.drawTurns();
  }

  closeDrawers() {
    for (const name of ["history", "parameters"]) if (this.layout.classList.contains(`with-${name}`)) this.toggle(name);
  }

  toggle(name) {
    const open = this.layout.classList.toggle(`with-${name}`);
    this.buttons[name].setAttribute("aria-expanded", String(open));
    if (open && matchMedia("(max-width: 999px)").matches) {
      this.layout.classList.remove(name === "history" ? "with-parameters" : "with-history");
      this[name].querySelector("button, input, textarea")?.focus();
    }
  }

  drawHistory() {
    const all = conversations();
    const item = (one) => h("li", { class: one.id === this.conversation.id ? "current" : "" },
      h("button", { type: "button", class: "quiet", "aria-current": one.id === this.conversation.id ? "true" : null, onclick: () => this.open(one) }, one.title || "Untitled"),
      h("button", { type: "button", class: "quiet icon tiny", "aria-label": `Delete ${one.title || "Untitled"}`, onclick: () => { remove(one.id); if (one.id === this.conversation.id) this.open(newConversation(one)); else this.drawHistory(); } }, "×"));
    fill(this.history,
      h("div", { class: "row" }, h("h2", { class: "grow" }, "History"),
        h("button", { type: "button", class: "tiny", onclick: () => { this.open(newConversation(this.conversation)); this.input.focus(); } }, "New chat")),
      h("ul", null, all.map(item)),
      !all.length && h("p", { class: "small muted" }, "Conversations are kept in this browser only."),
      all.length > 0 && h("button", { type: "button", class: "quiet tiny", onclick: async () => {
        if (await confirmed("Delete the history", `All ${all.length} conversations in this browser will be deleted.`, "Delete")) { removeAll(); this.open(newConversation(this.conversation)); }
      } }, "Delete all"));
  }

  drawModels() {
    const chosen = this.conversation.models;
    const set = (models) => { this.conversation.models = models; this.drawModels(); };
    const select = (index) => h("select", { "aria-label": `Model ${index + 1}`, onchange: (event) => set(chosen.map((name, other) => (other === index ? event.target.value : name))) },
      this.cards.filter(({ id }) => id === chosen[index] || !chosen.includes(id)).map(({ id }) => h("option", { value: id, selected: id === chosen[index] }, id)));
    const free = this.cards.find(({ id }) => !chosen.includes(id));
    fill(this.models,
      chosen.map((name, index) => h("span", { class: "model-choice" }, select(index),
        chosen.length > 1 && h("button", { type: "button", class: "quiet icon tiny", "aria-label": `Without ${name}`, onclick: () => set(chosen.filter((other) => other !== name)) }, "×"))),
      free && chosen.length > 0 && chosen.length < MAX_MODELS && h("button", { type: "button", class: "quiet tiny", onclick: () => set([...chosen, free.id]) }, "+ Compare"));
  }

  drawParameters() {
    fill(this.parameters, parameterPanel(this.conversation, this.cards, () => { if (this.conversation.turns.length) save(this.conversation); }));
  }

  drawTurns() {
    this.views = [];
    const { turns } = this.conversation;
    fill(this.transcript, turns.map((turn, index) => this.turnNode(turn, index)), !turns.length && this.welcome());
    this.toEnd(true);
  }

  welcome() {
    if (this.problem instanceof ApiError && this.problem.needsKey) {
      return h("div", { class: "welcome" }, h("h1", null, "This server has tenants"), h("p", { class: "muted" }, "Chat needs a tenant's key."),
        h("button", { type: "button", class: "primary", onclick: () => document.dispatchEvent(new Event("askforkeys")) }, "Enter a key"));
    }
    if (this.problem) return h("div", { class: "welcome" }, h("h1", null, "No models"), h("p", { class: "bad" }, explain(this.problem)));
    const ideas = ["Why does rain fall?", "Write a haiku about a river", "Explain paged attention in two sentences"];
    return h("div", { class: "welcome" }, h("h1", null, "Ask something"),
      h("p", { class: "muted" }, "Under every answer stands where its time went."),
      h("div", { class: "row" }, ideas.map((text) => h("button", { type: "button", onclick: () => { this.input.value = text; this.submit(); } }, text))));
  }

  turnNode(turn, index) {
    const views = Object.entries(turn.answers).map(([model, answer]) => this.answerView(model, answer, index));
    return h("section", { class: "turn" },
      turn.results ? h("p", { class: "small muted" }, "Results of tool calls were sent") : this.userNode(turn, index),
      h("div", { class: `answers n${views.length}` }, views.map((view) => view.element)));
  }

  answerView(model, answer, index) {
    const last = index === this.conversation.turns.length - 1;
    const view = new AnswerView(model, answer, {
      regenerate: () => this.regenerate(index, [model]),
      result: last ? (id, text) => this.sendResult(model, index, id, text) : null,
    });
    this.views.push({ view, answer });
    return view;
  }

  userNode(turn, index) {
    return h("div", { class: "user" }, h("div", { class: "bubble" }, turn.text),
      h("button", { type: "button", class: "quiet tiny", "aria-label": "Edit this message", onclick: (event) => this.edit(index, event.target.closest(".user")) }, "Edit"));
  }

  // ------------------------------------------------------------ acting

  typed(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.submit(); }
  }

  fit() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, 240)}px`;
  }

  submit() {
    const text = this.input.value.trim();
    if (!text || this.controllers.size) return;
    if (!this.conversation.models.length) { toast("There is no model to ask"); return; }
    this.input.value = "";
    this.fit();
    this.conversation.title ||= text.slice(0, 60);
    this.ask({ text, answers: {} });
  }

  ask(turn) {
    this.conversation.turns.push(turn);
    this.regenerate(this.conversation.turns.length - 1, this.conversation.models);
  }

  // Answer a turn anew. Turns after it go: they followed from the answer before.
  async regenerate(index, models) {
    if (this.controllers.size) return;
    const { conversation } = this;
    conversation.turns.length = index + 1;
    const turn = conversation.turns[index];
    for (const model of models) turn.answers[model] = newAnswer();
    save(conversation);
    this.drawTurns();
    const controller = new AbortController();
    this.controllers.add(controller);
    this.running(true);
    await Promise.all(models.map((model) => this.run(conversation, model, index, turn.answers[model], controller.signal)));
    this.controllers.delete(controller);
    save(conversation);
    this.running(this.controllers.size > 0);
    if (this.conversation === conversation) this.drawHistory();
  }

  run(conversation, model, index, answer, signal) {
    return generate(conversation, model, index, answer, signal, () => {
      this.views.find((one) => one.answer === answer)?.view.update();
      this.toEnd(false);
    });
  }

  running(is) {
    this.stopButton.hidden = !is;
    this.sendButton.hidden = is;
    this.layout.setAttribute("aria-busy", String(is));
  }

  stop() {
    for (const controller of this.controllers) controller.abort();
  }

  regenerateLast() {
    const last = this.conversation.turns.length - 1;
    if (last >= 0) this.regenerate(last, Object.keys(this.conversation.turns[last].answers));
  }

  editLast() {
    const index = this.conversation.turns.findLastIndex((turn) => !turn.results);
    if (index >= 0) this.edit(index, this.transcript.querySelectorAll(".turn")[index].querySelector(".user"));
  }

  edit(index, node) {
    if (this.controllers.size) return;
    const turn = this.conversation.turns[index];
    const area = h("textarea", { rows: "3", "aria-label": "Edit the message", value: turn.text });
    const cancel = () => node.replaceWith(this.userNode(turn, index));
    const submit = () => {
      if (!area.value.trim()) return;
      this.conversation.turns[index] = { text: area.value.trim(), answers: {} };
      this.regenerate(index, this.conversation.models);
    };
    fill(node, h("form", { class: "stack grow", onsubmit: (event) => { event.preventDefault(); submit(); } }, area,
      h("div", { class: "row" }, h("button", { type: "submit", class: "primary tiny" }, "Send"), h("button", { type: "button", class: "tiny", onclick: cancel }, "Cancel"))));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); cancel(); }
      if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); submit(); }
    });
    area.focus();
  }

  sendResult(model, index, id, text) {
    const turn = this.conversation.turns[index];
    turn.pending = { ...turn.pending, [id]: text };
    if (turn.answers[model].calls.every((call) => call.id in turn.pending)) {
      const results = turn.pending;
      delete turn.pending;
      this.conversation.turns.push({ results: { [model]: results }, answers: {} });
      this.regenerate(this.conversation.turns.length - 1, [model]);
    } else {
      toast("Kept until the other calls have results");
    }
  }

  toEnd(always) {
    const { scroller } = this;
    if (always || scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 120) {
      requestAnimationFrame(() => { scroller.scrollTop = scroller.scrollHeight; });
    }
  }
}
