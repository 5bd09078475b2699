// The admin page: tenants, keys, usage, caches and fleet, over /admin.

import { h, fill, toast, openDialog, confirmed, copyText, count, percent, bytes, duration, money } from "./dom.js";
import { send, json, explain, ApiError, key } from "./api.js";
import { table } from "./live.js";

const SECTIONS = { tenants: tenants, keys: keys, usage: usage, caches: caches, fleet: fleet };
const TITLES = { tenants: "Tenants", keys: "Keys", usage: "Usage", caches: "Caches", fleet: "Fleet" };

const call = (path, method, body) => json(path, { as: "admin", method, body });
const get = (path) => call(path, "GET");

export function adminPage(main, detail) {
  const body = h("div", { class: "admin-body", "aria-live": "off" });
  const tabs = h("nav", { class: "tabs", "aria-label": "Administration" });
  let section = SECTIONS[detail] ? detail : "tenants";
  let timer;

  async function draw() {
    clearTimeout(timer);
    fill(tabs, Object.entries(TITLES).map(([name, title]) => h("a", { href: `#admin/${name}`, "aria-current": name === section ? "page" : null }, title)));
    if (!key("admin")) { fill(body, needsKey("Administration needs the admin key.")); return; }
    const shown = section;
    try {
      const content = await SECTIONS[shown](draw);
      if (shown === section) fill(body, content);
      if (shown === "fleet" && document.body.contains(body)) timer = setTimeout(() => { if (!document.querySelector("dialog[open]") && !body.contains(document.activeElement)) draw(); }, 2000);
    } catch (error) {
      fill(body, error instanceof ApiError && error.needsKey ? needsKey(explain(error)) : h("p", { class: "bad", role: "alert" }, explain(error)));
    }
  }

  function turn(by) {
    const names = Object.keys(SECTIONS);
    location.hash = `admin/${names[(names.indexOf(section) + by + names.length) % names.length]}`;
  }

  document.addEventListener("keychange", draw);
  main.append(h("div", { class: "admin" }, h("h1", { class: "visually-hidden" }, "Administration"), tabs, body));
  draw();
  return {
    goTo: (name) => { section = SECTIONS[name] ? name : "tenants"; draw(); },
    leave: () => { clearTimeout(timer); document.removeEventListener("keychange", draw); },
    shortcuts: { ArrowLeft: ["Previous section", () => turn(-1)], ArrowRight: ["Next section", () => turn(1)] },
  };
}

function needsKey(text) {
  return h("div", { class: "welcome" }, h("h1", null, "Admin key needed"), h("p", { class: "muted" }, text), h("p", { class: "small muted" }, "penstock keys create --admin"),
    h("button", { type: "button", class: "primary", onclick: () => document.dispatchEvent(new Event("askforkeys")) }, "Enter the key"));
}

function heading(title, ...actions) {
  return h("div", { class: "row heading" }, h("h2", { class: "grow" }, title), actions);
}

// Runs an action of a button and says how it went.
async function act(button, work, said) {
  button.disabled = true;
  try {
    await work();
    toast(said);
  } catch (error) {
    toast(explain(error));
  }
  button.disabled = false;
}

// ------------------------------------------------------------ tenants

const FIELDS = [
  ["requests_per_minute", "Requests per minute", "number"], ["tokens_per_minute", "Tokens per minute", "number"], ["concurrent", "Requests at once", "number"],
  ["budget_per_day", "Budget per day", "number"], ["budget_per_month", "Budget per month", "number"], ["weight", "Weight", "number", "1"],
  ["max_tokens", "Most output tokens", "number"], ["max_prompt_tokens", "Most prompt tokens", "number"], ["timeout_seconds", "Timeout, seconds", "number"],
  ["default_class", "Default class", "text", "the server's"], ["models", "Models, by commas", "text", "all"],
];

async function tenants(redraw) {
  const { data } = await get("/admin/tenants");
  const limit = (value) => h("td", { class: "num" }, value === undefined ? "–" : count(value));
  const row = (one) => h("tr", null,
    h("td", null, h("b", null, one.name), one.source === "settings" && h("span", { class: "badge" }, "settings file")),
    limit(one.requests_per_minute), limit(one.tokens_per_minute), limit(one.concurrent),
    h("td", { class: "num" }, one.budget_per_day === undefined ? "–" : money(one.budget_per_day)), h("td", { class: "num" }, one.budget_per_month === undefined ? "–" : money(one.budget_per_month)),
    h("td", null, one.default_class || "–"),
    h("td", { class: "actions" }, one.source === "store" && [
      h("button", { type: "button", class: "tiny", "aria-label": `Change ${one.name}`, onclick: () => tenantDialog(one, redraw) }, "Change"),
      h("button", { type: "button", class: "tiny danger", "aria-label": `Delete ${one.name}`, onclick: async (event) => {
        if (await confirmed(`Delete ${one.name}`, "The tenant and all its keys will be removed. Requests with them are refused from then on.", "Delete")) {
          await act(event.target, () => call(`/admin/tenants/${encodeURIComponent(one.name)}`, "DELETE"), `${one.name} was deleted`);
          redraw();
        }
      } }, "Delete")]));
  return [heading("Tenants", h("button", { type: "button", class: "primary", onclick: () => tenantDialog(null, redraw) }, "New tenant")),
    h("div", { class: "scroll" }, table(["Name", "#Requests/min", "#Tokens/min", "#At once", "#Budget/day", "#Budget/month", "Class", ""], data.map(row), "No tenants: everybody on this machine may use the server without a key. The first tenant ends that."))];
}

function tenantDialog(tenant, redraw) {
  const problem = h("p", { class: "bad small", role: "alert" });
  const submit = (close) => async (event) => {
    event.preventDefault();
    const { elements } = event.target;
    const body = tenant?.model_limits ? { model_limits: tenant.model_limits } : {};
    for (const [name, , kind] of FIELDS) {
      const text = elements[name].value.trim();
      if (text) body[name] = name === "models" ? text.split(",").map((one) => one.trim()).filter(Boolean) : kind === "number" ? Number(text) : text;
    }
    try {
      await call(`/admin/tenants/${encodeURIComponent(tenant?.name ?? elements.name.value.trim())}`, "PUT", body);
      close(true);
      toast("Saved");
      redraw();
    } catch (error) {
      problem.textContent = explain(error);
    }
  };
  return openDialog(tenant ? `Tenant ${tenant.name}` : "New tenant", (close) => h("form", { class: "stack", onsubmit: submit(close) },
    !tenant && h("label", { class: "field" }, "Name", h("input", { name: "name", required: true, pattern: "[A-Za-z0-9][A-Za-z0-9._\\-]{0,63}", autocomplete: "off", autofocus: true })),
    h("div", { class: "pairs" }, FIELDS.map(([name, label, kind, unset = "no limit"]) => h("label", { class: "field" }, label,
      h("input", { name, type: kind, step: kind === "number" ? "any" : null, min: kind === "number" ? 0 : null, placeholder: unset, value: Array.isArray(tenant?.[name]) ? tenant[name].join(", ") : tenant?.[name] ?? "" })))),
    problem,
    h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => close(false) }, "Cancel"), h("button", { type: "submit", class: "primary" }, "Save"))));
}

// ------------------------------------------------------------ keys

async function keys(redraw) {
  const [{ data }, known] = await Promise.all([get("/admin/keys"), get("/admin/tenants")]);
  const row = (one) => h("tr", null, h("td", { class: "mono" }, one.prefix), h("td", null, one.admin ? h("span", { class: "badge warn" }, "admin") : one.tenant),
    h("td", null, new Date(one.created * 1000).toLocaleString()), h("td", null, one.note || "–"),
    h("td", { class: "actions" }, h("button", { type: "button", class: "tiny danger", "aria-label": `Revoke ${one.prefix}`, onclick: async (event) => {
      if (await confirmed("Revoke the key", `Requests with ${one.prefix} are refused within a second, in every gateway.`, "Revoke")) {
        await act(event.target, () => call(`/admin/keys/${one.id}`, "DELETE"), "The key was revoked");
        redraw();
      }
    } }, "Revoke")));
  return [heading("Keys", h("button", { type: "button", class: "primary", onclick: () => keyDialog(known.data, redraw) }, "New key")),
    h("div", { class: "scroll" }, table(["Key", "Tenant", "Made", "Note", ""], data.map(row), "No keys."))];
}

async function keyDialog(tenantList, redraw) {
  const problem = h("p", { class: "bad small", role: "alert" });
  const made = await openDialog("New key", (close) => h("form", { class: "stack", onsubmit: async (event) => {
    event.preventDefault();
    const { tenant, note } = event.target.elements;
    try {
      close(await call("/admin/keys", "POST", { ...(tenant.value ? { tenant: tenant.value } : { admin: true }), note: note.value }));
    } catch (error) {
      problem.textContent = explain(error);
    }
  } },
  h("label", { class: "field" }, "For", h("select", { name: "tenant", autofocus: true }, tenantList.map(({ name }) => h("option", { value: name }, name)), h("option", { value: "" }, "administration"))),
  h("label", { class: "field" }, "Note", h("input", { name: "note", maxlength: "200", autocomplete: "off" })), problem,
  h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => close() }, "Cancel"), h("button", { type: "submit", class: "primary" }, "Make"))));
  if (!made) return;
  await openDialog("The new key", (close) => [h("p", null, "It is shown this once: only its hash is stored."), h("p", { class: "mono secret" }, made.key),
    h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => copyText(made.key) }, "Copy"), h("button", { type: "button", class: "primary", autofocus: true, onclick: () => close() }, "Done"))]);
  redraw();
}

// ------------------------------------------------------------ usage

const range = { since: "", until: "", tenant: "" };

async function usage(redraw) {
  const query = new URLSearchParams(Object.entries(range).filter(([, value]) => value));
  const { data } = await get(`/admin/usage?${query}`);
  const field = (name, label, type) => h("label", { class: "field" }, label, h("input", { type, value: range[name], onchange: (event) => { range[name] = event.target.value.trim(); redraw(); } }));
  const sum = (name) => data.reduce((total, row) => total + Number(row[name]), 0);
  const cells = (row) => [row.requests, row.input_tokens, row.cached_tokens, row.output_tokens].map((value) => h("td", { class: "num" }, count(value)));
  const total = { requests: sum("requests"), input_tokens: sum("input_tokens"), cached_tokens: sum("cached_tokens"), output_tokens: sum("output_tokens") };
  const rows = data.map((row) => h("tr", null, h("td", null, row.day), h("td", null, row.tenant || "everybody"), h("td", null, row.model), cells(row), h("td", { class: "num" }, money(Number(row.cost)))));
  if (rows.length > 1) rows.push(h("tr", { class: "total" }, h("td", { colspan: "3" }, "Total"), cells(total), h("td", { class: "num" }, money(sum("cost")))));
  const download = async () => {
    query.set("format", "csv");
    const blob = await (await send(`/admin/usage?${query}`, { as: "admin" })).blob();
    const url = URL.createObjectURL(blob);
    const link = h("a", { href: url, download: "penstock-usage.csv" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  };
  return [heading("Usage", h("button", { type: "button", onclick: (event) => act(event.target, download, "The CSV file was saved") }, "Save as CSV")),
    h("div", { class: "row filters" }, field("since", "Since (default: this month)", "date"), field("until", "Until (default: today)", "date"), field("tenant", "Tenant (default: all)", "text")),
    h("div", { class: "scroll" }, table(["Day", "Tenant", "Model", "#Requests", "#Input", "#Cached", "#Output", "#Cost"], rows, "Nothing was used in this time."))];
}

// ------------------------------------------------------------ caches

async function caches(redraw) {
  const { answers, prefixes } = await get("/admin/cache");
  const requests = answers?.requests ?? {};
  const used = ["hit", "similar", "shared"].reduce((sum, state) => sum + (requests[state] || 0), 0);
  const asked = used + (requests.miss || 0);
  const flush = async (event) => {
    if (await confirmed("Flush the answer cache", "All stored answers are forgotten, in memory, on disk and in Redis. Prefixes in the engines stay.", "Flush")) {
      await act(event.target, () => call("/admin/cache", "DELETE"), "The answer cache is empty");
      redraw();
    }
  };
  return [heading("Answer cache", answers?.enabled && h("button", { type: "button", class: "danger", onclick: flush }, "Flush")),
    !answers?.enabled ? h("p", { class: "muted" }, "It is off (cache.enabled).") : [
      h("div", { class: "tiles" }, [["Hit ratio", percent(used, asked), `${count(used)} of ${count(asked)} requests`], ["Stored", count(answers.stored), "answers since the start"],
        ["Bypassed", count(requests.bypass || 0), "sampled, or no-store"]].map(([label, value, note]) => h("div", { class: "tile" }, h("span", { class: "small muted" }, label), h("b", null, value), h("span", { class: "small muted" }, note)))),
      h("div", { class: "scroll" }, table(["Tier", "State", "#Size", "#Evictions", "#Errors"], answers.tiers.map((tier) => h("tr", null, h("td", null, tier.name), h("td", null, h("span", { class: `badge ${tier.up ? "good" : "bad"}` }, tier.up ? "up" : "down")),
        h("td", { class: "num" }, bytes(tier.bytes)), h("td", { class: "num" }, count(tier.evictions)), h("td", { class: "num" }, count(tier.errors)))), ""))],
    heading("Prefix cache of the engines"),
    h("div", { class: "scroll" }, table(["Model", "#Hit ratio", "#Prompt tokens", "#Cached", "#KV blocks", "#In use"], Object.entries(prefixes).map(([name, one]) => h("tr", null, h("td", null, name), h("td", { class: "num" }, percent(one.cached_tokens, one.prompt_tokens)),
      [one.prompt_tokens, one.cached_tokens, one.kv_blocks, one.kv_blocks_used].map((value) => h("td", { class: "num" }, count(value))))), ""))];
}

// ------------------------------------------------------------ fleet

const STATES = { ready: "good", draining: "warn", lost: "bad", stopped: "bad" };

async function fleet(redraw) {
  const { data, autoscale } = await get("/admin/fleet");
  const action = (one, name, title, text, said) => h("button", { type: "button", class: "tiny", "aria-label": `${title} ${one.id}`, disabled: one.state !== "ready", onclick: async (event) => {
    if (await confirmed(`${title} ${one.id}`, text, title)) {
      await act(event.target, () => call(`/admin/fleet/${encodeURIComponent(one.id)}/${name}`, "POST", {}), said);
      redraw();
    }
  } }, title);
  const row = (one) => h("tr", null, h("td", null, h("b", null, one.id), one.detail && h("div", { class: "small muted" }, one.detail)), h("td", null, one.model), h("td", null, one.place),
    h("td", null, h("span", { class: `badge ${one.open_circuit ? "bad" : STATES[one.state] || ""}` }, one.open_circuit ? "circuit open" : one.state)), h("td", { class: "num" }, duration(one.seconds)),
    [one.streams, one.running, one.waiting].map((value) => h("td", { class: "num" }, count(value))), h("td", { class: "num" }, percent(one.kv_blocks_used, one.kv_blocks)), h("td", { class: "num" }, one.restarts),
    h("td", { class: "actions" },
      action(one, "drain", "Drain", "It takes no more requests, finishes what it has within 30 s, and stops.", `${one.id} drains`),
      action(one, "restart", "Restart", "A new worker is started first. When it is ready, this one finishes what it has within 30 s and stops.", `${one.id} was restarted`)));
  const addTo = async (event, model) => { await act(event.target, () => call("/admin/fleet", "POST", { model, count: 1 }), "Another replica starts"); redraw(); };
  const models = [...new Set(data.map((one) => one.model))].filter((model) => !autoscale.some((one) => one.model === model));
  return [heading("Replicas", models.map((model) => h("button", { type: "button", onclick: (event) => addTo(event, model) }, models.length > 1 ? `Add one of ${model}` : "Add a replica"))),
    h("div", { class: "scroll" }, table(["Replica", "Model", "Place", "State", "#For", "#Streams", "#Running", "#Waiting", "#KV", "#Restarts", ""], data.map(row), "This gateway has no replicas of its own.")),
    autoscale.length > 0 && [heading("Autoscaling"), h("div", { class: "scroll" }, table(["Model", "#Ready", "#Starting", "#Wanted", "#From", "#To", "#Held", "Why"], autoscale.map((one) => h("tr", null, h("td", null, one.model),
      [one.ready, one.starting, one.wanted, one.min_replicas, one.max_replicas, one.held].map((value) => h("td", { class: "num" }, count(value))), h("td", { class: "small" }, one.reason)))))]];
}
