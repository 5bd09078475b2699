// The API as /openapi.json describes it, and a form to try each endpoint.

import { explain, key, send, setKey } from "/web/api.js";
import { fill, h } from "/web/dom.js";

const GROUPS = [
  ["Generate", /^\/(v1\/(chat|completions|responses|messages|embeddings)|(v\d\/)?(rerank|score))/],
  ["Files and batches", /^\/v1\/(files|batches)/],
  ["Models and requests", /^\/v1\//],
  ["Administration", /^\/admin/],
  ["Other servers' APIs", /^\/(api|completion|props|slots)/],
  ["The server", /^\//],
];
const HIDDEN = /^\/(web\/|docs$|$)/;
const MAX_DEPTH = 3;

let schemas = {};
let models = []; // that are served

function resolved(schema) {
  return schema?.$ref ? schemas[schema.$ref.split("/").pop()] : schema ?? {};
}

// `string or array of integer`, in a few words.
function typeOf(schema) {
  const plain = resolved(schema);
  if (plain.enum) return plain.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (plain.anyOf) return [...new Set(plain.anyOf.map(typeOf))].filter((name) => name !== "null").join(" or ");
  if (plain.const !== undefined) return JSON.stringify(plain.const);
  if (plain.type === "array") return `array of ${typeOf(plain.items)}`;
  return plain.type ?? "anything";
}

function limitsOf(schema) {
  const options = [resolved(schema), ...(resolved(schema).anyOf ?? []).map(resolved)];
  const names = { minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<", maxLength: "length ≤", maxItems: "items ≤" };
  const found = options.flatMap((one) => Object.entries(names).filter(([name]) => name in one).map(([name, sign]) => `${sign} ${one[name]}`));
  const given = resolved(schema).default;
  return [...new Set(found), ...(given === undefined || given === null ? [] : [`default ${JSON.stringify(given)}`])].join(", ");
}

// The objects that a field may hold.
function objectsIn(schema) {
  const plain = resolved(schema);
  if (plain.properties) return [plain];
  return [...(plain.anyOf ?? []), ...(plain.items ? [plain.items] : [])].flatMap(objectsIn);
}

function fieldsOf(schema, depth = 0) {
  const rows = [];
  for (const object of objectsIn(schema)) {
    for (const [name, field] of Object.entries(object.properties)) {
      const required = (object.required ?? []).includes(name);
      rows.push(h("tr", null,
        h("td", { class: "mono" }, name, required && h("span", { class: "bad", title: "required" }, " *")),
        h("td", null, typeOf(field)),
        h("td", { class: "muted" }, [limitsOf(field), resolved(field).description].filter(Boolean).join("; "))));
      const inner = depth < MAX_DEPTH && objectsIn(field).length ? fieldsOf(field, depth + 1) : null;
      if (inner) rows.push(h("tr", null, h("td", { colspan: 3, class: "nested" }, folded(`${name}: fields`, inner))));
    }
  }
  return rows.length ? h("div", { class: "scroll" }, h("table", null, h("tbody", null, rows))) : null;
}

function folded(title, content) {
  return h("details", null, h("summary", { class: "small muted" }, title), h("div", null, content));
}

function parametersOf(operation) {
  const rows = (operation.parameters ?? []).map((one) => h("tr", null,
    h("td", { class: "mono" }, one.name, one.required && h("span", { class: "bad", title: "required" }, " *")),
    h("td", null, `${typeOf(one.schema)}, in the ${one.in}`),
    h("td", { class: "muted" }, [limitsOf(one.schema), one.description].filter(Boolean).join("; "))));
  return rows.length ? [h("h3", null, "Parameters"), h("div", { class: "scroll" }, h("table", null, h("tbody", null, rows)))] : [];
}

// A body to begin with: what is required, with the shortest value that it may have.
function example(schema) {
  const plain = resolved(schema);
  if (plain.enum) return plain.enum[0];
  if (plain.anyOf) return example(plain.anyOf[0]);
  if (plain.properties) return Object.fromEntries((plain.required ?? []).map((name) => [name, example(plain.properties[name])]));
  const values = { string: "Hello!", integer: 64, number: 1, boolean: false, object: {}, null: null };
  return plain.type === "array" ? [example(plain.items)] : values[plain.type] ?? null;
}

function bodyFor(path, schema) {
  const body = example(schema);
  if (Array.isArray(body?.messages)) body.messages = [{ role: "user", content: "Hello!" }];
  if (path === "/v1/responses") body.input = "Hello!";
  const task = /embed|rerank|score/.test(path) ? "embed" : "generate";
  const model = models.find((one) => one.task === task) ?? models[0];
  if (body && "model" in body && model) body.model = model.id;
  return JSON.stringify(body, null, 2);
}

function tryIt(path, method, operation) {
  const schema = operation.requestBody?.content?.["application/json"]?.schema;
  if (operation.requestBody && !schema) return [];
  const url = h("input", { value: path, "aria-label": "Path", class: "mono" });
  const body = schema && h("textarea", { "aria-label": "Body", spellcheck: "false", value: bodyFor(path, schema) });
  const answer = h("pre", { hidden: true, tabindex: "0", "aria-label": "Answer" });
  const button = h("button", { type: "button", class: "primary" }, "Send");
  button.addEventListener("click", async () => {
    button.disabled = true;
    fill(answer, "…").hidden = false;
    try {
      const response = await send(url.value, { method: method.toUpperCase(), body: body && JSON.parse(body.value) });
      await show(response, answer);
    } catch (error) {
      fill(answer, error instanceof SyntaxError ? `The body is not JSON: ${error.message}` : explain(error));
    }
    button.disabled = false;
  });
  return [h("h3", null, "Try it"), h("div", { class: "row" }, h("div", { class: "grow" }, url), button), body, answer];
}

async function show(response, answer) {
  if (response.headers.get("content-type")?.startsWith("application/json")) {
    fill(answer, JSON.stringify(await response.json(), null, 2));
    return;
  }
  fill(answer);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) answer.append(part.value);
}

function endpoint(path, method, operation) {
  const box = h("details", { id: `${method}-${path}` },
    h("summary", null, h("span", { class: `method ${method}` }, method.toUpperCase()), h("code", { class: "mono" }, path), h("span", { class: "muted small" }, operation.summary)));
  box.addEventListener("toggle", () => {
    if (!box.open || box.childElementCount > 1) return;
    const content = Object.values(operation.requestBody?.content ?? {})[0];
    const answered = Object.entries(operation.responses).find(([status]) => status.startsWith("2"));
    const answer = answered && fieldsOf(answered[1].content?.["application/json"]?.schema);
    box.append(h("div", null, parametersOf(operation),
      content && [h("h3", null, "Body"), fieldsOf(content.schema)],
      tryIt(path, method, operation),
      answer && folded(`Answer (${answered[0]}): fields`, answer)));
  });
  return box;
}

async function main() {
  const place = document.getElementById("main");
  const given = document.getElementById("key");
  given.value = key("tenant");
  given.addEventListener("change", () => setKey("tenant", given.value.trim()));
  let api;
  try {
    api = await (await send("/openapi.json")).json();
  } catch (error) {
    fill(place, h("p", { class: "bad" }, explain(error)));
    return;
  }
  schemas = api.components.schemas;
  models = await send("/v1/models").then((response) => response.json()).then(({ data }) => data, () => []); // needs a key, perhaps
  const left = Object.entries(api.paths).filter(([path]) => !HIDDEN.test(path));
  const sections = [];
  for (const [title, pattern] of GROUPS) {
    const found = left.filter(([path]) => pattern.test(path));
    found.forEach((one) => left.splice(left.indexOf(one), 1));
    const shown = found.flatMap(([path, methods]) => Object.entries(methods).map(([method, operation]) => endpoint(path, method, operation)));
    if (shown.length) sections.push(h("section", null, h("h2", null, title), shown));
  }
  fill(place, h("div", { class: "row" }, h("h1", null, "API"), h("span", { class: "muted" }, `${api.info.title} ${api.info.version}`)), sections);
}

main();
