// The account of one request as a bar, with what is behind it.

import { h, duration, count, percent } from "./dom.js";

const PARTS = {
  prepare: "reading the body, key, chat template, tokenising, limits",
  held: "until there was a replica",
  cascade: "at a small model whose answer was not used",
  queued: "in the engine, before its first step",
  prefill: "steps that computed its prompt",
  decode: "steps that computed its answer",
  stalled: "the engine computed others instead",
  failover: "at replicas that were lost",
  answer: "from the answer cache, or never run",
  relay: "sockets, tokens to text, sending",
};
const QUEUE = { step: "a step was under way", order: "others went first", rows: "no row was free", memory: "no KV block was free", preempted: "its memory was taken away" };
const MISSES = { never_seen: "never seen", evicted: "evicted", too_short: "too short for a block", other_salt: "of another tenant or salt", off: "the prefix cache is off" };

export function partsOf(account) {
  const parts = account.choices[0]?.parts || {};
  return Object.keys(PARTS).map((name) => [name, Math.max(0, parts[name] || 0)]).filter(([, seconds]) => seconds > 0);
}

export function tokensPerSecond(account) {
  const seconds = account.ttft === null ? 0 : account.total - account.ttft;
  return account.output_tokens > 1 && seconds > 0 ? (account.output_tokens - 1) / seconds : null;
}

export function missed(account) {
  const engine = account.choices[0]?.engine;
  return account.status >= 400 && account.status !== 499 || engine?.met_ttft === false || engine?.met_gap === false;
}

function bar(account) {
  const parts = partsOf(account);
  const label = parts.map(([name, seconds]) => `${name} ${duration(seconds)}`).join(", ");
  return h("div", { class: "ledger-bar", role: "img", "aria-label": `Where ${duration(account.total)} went: ${label}` },
    parts.map(([name, seconds]) => h("i", { class: `p-${name}`, style: { flex: `${seconds / account.total * 1000} 0 0` }, title: `${name} ${duration(seconds)}: ${PARTS[name]}` })));
}

function fact(label, value, kind = "") {
  return h("span", { class: kind }, h("b", { class: kind }, value), ` ${label}`);
}

function objective(engine) {
  if (!engine) return null;
  const late = [engine.met_ttft === false && "TTFT", engine.met_gap === false && "ITL"].filter(Boolean);
  if (late.length) return h("span", { class: "badge bad" }, `missed ${late.join(" and ")}`);
  return engine.met_ttft || engine.met_gap ? h("span", { class: "badge good" }, "objective met") : null;
}

// `open`: with its details. `link(id)`: an element that leads to another request, or null.
export function ledgerView(account, { open = false, link = () => null } = {}) {
  const speed = tokensPerSecond(account);
  const engine = account.choices[0]?.engine;
  const cache = account.choices[0]?.cache;
  const hit = cache === "hit" || cache === "similar" || cache === "shared";
  return h("div", { class: "ledger" }, bar(account),
    h("div", { class: "ledger-facts" },
      fact("in all", duration(account.total)),
      account.ttft !== null && fact("TTFT", duration(account.ttft)),
      speed && fact("tokens/s", speed.toFixed(speed < 100 ? 1 : 0)),
      fact("tokens", count(account.output_tokens)),
      account.cached_tokens > 0 && fact("of the prompt cached", percent(account.cached_tokens, account.prompt_tokens)),
      hit && h("span", { class: "badge good" }, `answer cache: ${cache}`),
      objective(engine)),
    h("details", { open }, h("summary", null, "Where the time went"), details(account, engine, link)));
}

function details(account, engine, link) {
  const rows = partsOf(account).map(([name, seconds]) => h("tr", null,
    h("td", null, h("i", { class: `swatch p-${name}` }), name),
    h("td", { class: "num" }, duration(seconds)),
    h("td", { class: "num" }, percent(seconds, account.total)),
    h("td", null, notes(name, engine, link))));
  return h("div", { class: "scroll" },
    h("table", null,
      h("thead", { class: "visually-hidden" }, h("tr", null, ["part", "time", "share", "what"].map((name) => h("th", null, name)))),
      h("tbody", null, rows, more(account, engine).map(([name, text]) =>
        h("tr", null, h("td", null, name), h("td", { colspan: "3" }, text))))));
}

function notes(name, engine, link) {
  if (name === "queued" && engine) {
    return Object.entries(engine.queued).map(([cause, seconds]) => `${QUEUE[cause] || cause} ${duration(seconds)}`).join(", ");
  }
  if (name === "prefill" && engine) {
    const chunks = engine.prefill.filter((chunk) => chunk.tokens);
    const few = chunks.slice(0, 4).map((chunk) => `${chunk.tokens} tokens in ${duration(chunk.seconds)}`).join(", ");
    return chunks.length > 4 ? `${chunks.length} chunks: ${few}, …` : few || PARTS[name];
  }
  if (name === "decode" && engine) return `${count(engine.decode_steps)} steps`;
  if (name === "stalled" && engine?.stalls.length) {
    return engine.stalls.slice(0, 4).map((stall, index) => [index ? ", " : "by ",
      stall.request_id ? link(stall.request_id) || h("span", { class: "mono" }, stall.request_id.slice(0, 8)) : "a request that is not named",
      ` ${duration(stall.seconds)}`]);
  }
  return PARTS[name];
}

function more(account, engine) {
  const found = [];
  if (engine) {
    const misses = Object.entries(engine.missed_tokens).filter(([, tokens]) => tokens > 0)
      .map(([cause, tokens]) => `${tokens} ${MISSES[cause] || cause}`).join(", ");
    found.push(["prefix cache", `${engine.cached_tokens} of ${engine.prompt_tokens} prompt tokens cached${misses ? `; missed: ${misses}` : ""}`]);
    if (engine.predicted_ttft !== null) found.push(["forecast", `first token after ${duration(engine.predicted_ttft)}; it came after ${duration(engine.ttft)}`]);
    if (engine.preemptions) found.push(["preempted", `${engine.preemptions} times, ${engine.recomputed_tokens} tokens computed again`]);
    if (engine.forced_tokens) found.push(["grammar", `${engine.forced_tokens} tokens were forced and not sampled`]);
    if (engine.replica) found.push(["replica", `${engine.replica}${engine.routing ? `: ${engine.routing}` : ""}`]);
    for (const lost of engine.failovers) found.push(["failover", `${lost.replica}: ${lost.cause}`]);
  }
  if (account.why) found.push(["model", `${account.model}: ${account.why}`]);
  for (const attempt of account.attempts || []) found.push(["attempt", `${attempt.model}, ${duration(attempt.seconds)}: ${attempt.why}`]);
  if (account.error) found.push(["error", account.error]);
  found.push(["request", h("span", { class: "mono" }, account.request_id)]);
  return found;
}
