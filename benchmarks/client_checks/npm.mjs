// The clients of npm against `penstock serve`: run by clients.py, which says where their packages are.
// A line of JSON for each check: {name, seen, failed}.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" });
const messages = [{ role: "user", content: "Name a river." }];
const city = {
  type: "object",
  properties: { name: { type: "string", maxLength: 20 }, country: { enum: ["Germany", "France", "Spain"] } },
  required: ["name", "country"],
  additionalProperties: false,
};

function assert(condition, what) {
  if (!condition) throw new Error(what);
}

async function textAndStream(languageModel) {
  const whole = await generateText({ model: languageModel, prompt: "Name a river.", maxOutputTokens: 24, maxRetries: 0 });
  const stream = streamText({ model: languageModel, prompt: "Name a river.", maxOutputTokens: 24, maxRetries: 0 });
  let pieces = 0;
  for await (const _ of stream.textStream) pieces += 1;
  assert(whole.text && pieces > 1, "no text");
  return `${whole.text.length} characters, ${whole.usage.outputTokens} tokens; ${pieces} pieces`;
}

async function calls(languageModel) {
  const weather = tool({
    description: "Weather of a city.",
    inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"], additionalProperties: false }),
  });
  const answer = await generateText({
    model: languageModel, prompt: "What is the weather in Bonn?", tools: { weather },
    toolChoice: { type: "tool", toolName: "weather" }, maxOutputTokens: 200, maxRetries: 0,
  });
  const [call] = answer.toolCalls;
  assert(typeof call.input.city === "string", JSON.stringify(call));
  return `${call.toolName}(${JSON.stringify(call.input)})`;
}

const CHECKS = {
  "npm openai: `chat.completions`, streamed": async () => {
    let pieces = 0;
    for await (const chunk of await client.chat.completions.create({ model, messages, max_tokens: 24, stream: true })) {
      pieces += Boolean(chunk.choices[0]?.delta.content);
    }
    assert(pieces > 1, "no pieces");
    return `${pieces} pieces`;
  },
  "npm openai: `responses.stream`": async () => {
    const stream = client.responses.stream({ model, input: "Name a river.", max_output_tokens: 60 });
    let events = 0;
    for await (const _ of stream) events += 1;
    const last = await client.responses.create({ model, input: "Hi", max_output_tokens: 8 });
    return `${events} events; ${last.status}`;
  },
  "npm ai, `@ai-sdk/openai`: responses": () => textAndStream(openai(model)),
  "npm ai, `@ai-sdk/openai`: chat": () => textAndStream(openai.chat(model)),
  "npm ai, `@ai-sdk/anthropic`": () => textAndStream(anthropic(model)),
  "npm ai: tools over responses": () => calls(openai(model)),
  "npm ai: tools over Anthropic's API": () => calls(anthropic(model)),
  "npm ai: `Output.object`": async () => {
    const answer = await generateText({
      model: openai(model), prompt: "Name a city.", output: Output.object({ schema: jsonSchema(city) }), maxRetries: 0,
    });
    return JSON.stringify(answer.output);
  },
};

for (const [name, check] of Object.entries(CHECKS)) {
  let seen, failed = 0;
  try {
    seen = await check();
  } catch (error) {
    failed = 1;
    seen = `**failed**: ${error.message ?? error}`;
    console.error(error);
  }
  console.log(JSON.stringify({ name, seen, failed }));
}
