// The parameters of a conversation: system prompt, sampling, class, tools.

import { h } from "./dom.js";

const NUMBERS = [
  ["temperature", "Temperature", 0, 2, 0.1],
  ["top_p", "Top p", 0, 1, 0.05],
  ["max_tokens", "Most tokens", 1, 1e6, 1],
  ["seed", "Seed", 0, 2 ** 31, 1],
  ["top_k", "Top k", -1, 1e5, 1],
  ["min_p", "Min p", 0, 1, 0.01],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1],
];
const EXAMPLE = '[{"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]';

export function parameterPanel(conversation, cards, changed) {
  const { params } = conversation;
  const card = cards.find(({ id }) => id === conversation.models[0]);
  const set = (name, value) => {
    if (value === "" || value === false) delete params[name];
    else params[name] = value;
    changed();
  };
  const number = ([name, label, min, max, step]) => h("label", { class: "field" }, label,
    h("input", { type: "number", min, max, step: step < 1 ? "any" : step, inputmode: "decimal", value: params[name] ?? "", placeholder: card?.sampling_defaults[name] ?? "default", oninput: (event) => set(name, event.target.value) }));
  const tiers = card ? Object.entries(card.classes) : [];
  const promise = ({ ttft_ms: ttft, itl_ms: itl }) => [ttft && `TTFT ${Math.round(ttft)} ms`, itl && `ITL ${Math.round(itl)} ms`].filter(Boolean).join(", ");
  return h("form", { class: "stack", onsubmit: (event) => event.preventDefault() },
    h("h2", null, "Parameters"),
    h("label", { class: "field" }, "System prompt",
      h("textarea", { rows: "4", value: conversation.system, oninput: (event) => { conversation.system = event.target.value; changed(); } })),
    h("div", { class: "pairs" }, NUMBERS.map(number)),
    h("label", { class: "field" }, "Class",
      h("select", { onchange: (event) => set("service_tier", event.target.value) },
        h("option", { value: "" }, "as the tenant's default"),
        tiers.map(([name, objective]) => h("option", { value: name, selected: params.service_tier === name }, promise(objective) ? `${name} (${promise(objective)})` : name)))),
    h("label", { class: "field" }, "Stop strings, one per line",
      h("textarea", { rows: "2", value: params.stop ?? "", oninput: (event) => set("stop", event.target.value) })),
    h("label", { class: "check" }, h("input", { type: "checkbox", checked: Boolean(params.logprobs), onchange: (event) => set("logprobs", event.target.checked) }), "Log-probabilities: alternatives of each token"),
    h("label", { class: "field" }, "Tools (JSON, as in the API)",
      h("textarea", { rows: "4", class: "mono", spellcheck: "false", value: params.tools ?? "", placeholder: EXAMPLE, oninput: (event) => set("tools", event.target.value) })),
    card && h("p", { class: "small muted" }, `Context ${card.max_model_len} tokens · tools ${card.tool_parser || "–"} · reasoning ${card.reasoning_parser || "–"}`));
}
