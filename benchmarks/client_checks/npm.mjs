// The clients of npm against `penstock serve`: run by clients.py, which says where their packages are.
// A line of JSON for each check: {name, seen, failed}.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import Anthropic from "@anthropic-ai/sdk";
import { ChatOpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { Agent as MastraAgent } from "@mastra/core/agent";
import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool as agentTool } from "@openai/agents";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";
import { CohereClientV2 } from "cohere-ai";
import { Ollama } from "ollama";
import OpenAI from "openai";
import { z } from "zod";

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
const City = z.object({ name: z.string().max(20), country: z.enum(["Germany", "France", "Spain"]) });
const weatherOf = z.object({ city: z.string().max(20) });
const question = "What is the weather in Bonn?";
const encoder = (await client.models.list()).data.find((each) => each.task === "embed").id;

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
    model: languageModel, prompt: question, tools: { weather },
    toolChoice: { type: "tool", toolName: "weather" }, maxOutputTokens: 200, maxRetries: 0,
  });
  const [call] = answer.toolCalls;
  assert(typeof call.input.city === "string", JSON.stringify(call));
  return `${call.toolName}(${JSON.stringify(call.input)})`;
}

async function agents(served) {
  setTracingDisabled(true);
  const cities = [];
  const weather = agentTool({
    name: "weather", description: "Weather of a city.", parameters: weatherOf,
    execute: async ({ city }) => (cities.push(city), "rain"),
  });
  const modelSettings = { toolChoice: "required", parallelToolCalls: false, temperature: 0 };
  const asked = new Agent({ name: "Weather", instructions: "Be brief.", model: served, tools: [weather], modelSettings });
  const stream = await run(asked, question, { stream: true, maxTurns: 4 });
  let events = 0;
  for await (const _ of stream) events += 1;
  const guide = new Agent({ name: "Guide", instructions: "Be brief.", model: served, outputType: City });
  const found = (await run(guide, "Name a city.")).finalOutput;
  assert(cities.length && stream.finalOutput, "no call or no answer");
  return `weather(${cities[0]}), ${events} events; ${JSON.stringify(City.parse(found))}`;
}

async function langchain(useResponsesApi) {
  const configuration = { baseURL: `${url}/v1` };
  const chat = new ChatOpenAI({ model, apiKey: "none", configuration, maxTokens: 100, maxRetries: 0, useResponsesApi });
  let chunks = 0;
  for await (const _ of await chat.stream("Name a river.")) chunks += 1;
  const weather = { type: "function", function: { name: "weather", parameters: z.toJSONSchema(weatherOf) } };
  const [call] = (await chat.bindTools([weather], { tool_choice: "weather" }).invoke(question)).tool_calls;
  const found = await chat.withStructuredOutput(City).invoke("Name a city.");
  assert(chunks > 1, "no chunks");
  return `${chunks} chunks; weather(${weatherOf.parse(call.args).city}); ${JSON.stringify(City.parse(found))}`;
}

async function mastra(served) {
  const agent = new MastraAgent({ id: "guide", name: "Guide", instructions: "Be brief.", model: served });
  const stream = await agent.stream("Name a river.", { modelSettings: { maxOutputTokens: 24 } });
  let pieces = 0;
  for await (const _ of stream.textStream) pieces += 1;
  const found = (await agent.generate("Name a city.", { structuredOutput: { schema: City } })).object;
  assert(pieces > 1, "no pieces");
  return `${pieces} pieces; ${JSON.stringify(City.parse(found))}`;
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
  "npm `@openai/agents`: responses": () => agents(new OpenAIResponsesModel(client, model)),
  "npm `@openai/agents`: chat": () => agents(new OpenAIChatCompletionsModel(client, model)),
  "npm `@langchain/openai`: chat": () => langchain(false),
  "npm `@langchain/openai`: responses": () => langchain(true),
  "npm `@langchain/openai`: `OpenAIEmbeddings`": async () => {
    const embeddings = new OpenAIEmbeddings({ model: encoder, apiKey: "none", configuration: { baseURL: `${url}/v1` } });
    const vectors = await embeddings.embedDocuments(["Name a river.", "Name a city."]);
    assert(vectors.length === 2, "not a vector for each");
    return `${vectors.length} vectors of ${vectors[0].length} numbers`;
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
  "npm `@mastra/core`, `@ai-sdk/openai`": () => mastra(openai(model)),
  "npm `@mastra/core`: `url` of a model": () => mastra({ id: `penstock/${model}`, url: `${url}/v1`, apiKey: "none" }),
  "npm `@anthropic-ai/sdk`: `messages.stream`, tools": async () => {
    const claude = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
    let pieces = 0;
    const stream = claude.messages.stream({ model, max_tokens: 24, messages }).on("text", () => (pieces += 1));
    const whole = await stream.finalMessage();
    const asked = await claude.messages.create({
      model, max_tokens: 100, messages: [{ role: "user", content: question }],
      tools: [{ name: "weather", input_schema: z.toJSONSchema(weatherOf) }],
      tool_choice: { type: "any", disable_parallel_tool_use: true },
    });
    const [call] = asked.content.filter((block) => block.type === "tool_use");
    assert(pieces > 1, "no pieces");
    return `${pieces} pieces, ${whole.stop_reason}; weather(${weatherOf.parse(call.input).city})`;
  },
  "npm ollama: `chat`, `embed`": async () => {
    const ollama = new Ollama({ host: url });
    let lines = 0;
    for await (const _ of await ollama.chat({ model, messages, stream: true, options: { num_predict: 24 } })) lines += 1;
    const { embeddings } = await ollama.embed({ model: encoder, input: ["Name a river.", "Name a city."] });
    assert(lines > 1 && embeddings.length === 2, "no lines, or not a vector for each");
    return `${lines} lines; ${embeddings.length} vectors of ${embeddings[0].length} numbers`;
  },
  "npm cohere-ai: `rerank`": async () => {
    const cohere = new CohereClientV2({ token: "none", environment: url });
    const documents = ["My cat sleeps.", "It is raining."];
    const { results } = await cohere.rerank({ model: encoder, query: "weather", documents, topN: 1 });
    assert(results.length === 1 && results[0].index === 1, JSON.stringify(results));
    return `'${documents[1]}' before '${documents[0]}'`;
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
