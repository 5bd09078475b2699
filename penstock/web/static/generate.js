// One streamed answer: from POST /v1/chat/completions to an object that grows.

import { send, json, events, explain, ApiError } from "./api.js";
import { messagesOf } from "./history.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"];
const ACCOUNT_TRIES = 5;

export function newAnswer() {
  return { content: "", reasoning: "", calls: [], tokens: [], finish: null, error: null, account: null, running: true };
}

function bodyOf(conversation, model, end) {
  const { params } = conversation;
  const body = { model, messages: messagesOf(conversation, model, end), stream: true };
  for (const name of NUMBERS) if (params[name] !== undefined && params[name] !== "") body[name] = Number(params[name]);
  if (params.stop) body.stop = params.stop.split("\n").filter(Boolean);
  if (params.service_tier) body.service_tier = params.service_tier;
  if (params.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  if (params.tools?.trim()) body.tools = JSON.parse(params.tools);
  return body;
}

// Fills `answer` and calls `changed` after each event. `signal` stops it.
export async function generate(conversation, model, end, answer, signal, changed) {
  const id = `web-${Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
  let reached = false; // the engine, so that there is a ledger
  try {
    const body = bodyOf(conversation, model, end);
    const response = await send("/v1/chat/completions", { method: "POST", body, signal, headers: { "x-request-id": id } });
    reached = true;
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(500, chunk.error);
      for (const choice of chunk.choices) take(answer, choice);
      changed();
    }
  } catch (error) {
    if (error.name === "AbortError") answer.finish = "stopped";
    else answer.error = error instanceof SyntaxError ? "The tools are not valid JSON." : explain(error);
    answer.needsKey = error instanceof ApiError && error.needsKey;
    reached ||= error.name === "AbortError";
  }
  answer.running = false;
  changed();
  if (reached) answer.account = await accountOf(id, answer.finish === "stopped" ? 300 : 0);
  changed();
}

function take(answer, { delta, logprobs, finish_reason: finish }) {
  if (delta.content) answer.content += delta.content;
  if (delta.reasoning_content) answer.reasoning += delta.reasoning_content;
  for (const part of delta.tool_calls || []) {
    const call = (answer.calls[part.index] ??= { id: "", name: "", arguments: "" });
    if (part.id) call.id = part.id;
    if (part.function.name) call.name += part.function.name;
    call.arguments += part.function.arguments || "";
  }
  if (logprobs?.content) answer.tokens.push(...logprobs.content);
  if (finish) answer.finish = finish;
}

// A request that was stopped is accounted for as soon as the engine has let go of it.
async function accountOf(id, wait) {
  await new Promise((resolve) => setTimeout(resolve, wait));
  for (let attempt = 0; attempt < ACCOUNT_TRIES; attempt += 1) {
    try {
      return await json(`/v1/requests/${id}`);
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 404) return null;
      await new Promise((resolve) => setTimeout(resolve, 100 * 2 ** attempt));
    }
  }
  return null;
}
