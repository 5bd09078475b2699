// The live page: one stream of events, drawn four times a second; pause and scrub the last ten minutes.

import { h, fill, duration, count, rate, percent, money, clock, openDialog } from "./dom.js";
import { send, events, explain, ApiError } from "./api.js";
import { LiveStore, KEEP_SECONDS, reading, rates, composition, latencies, quantile } from "./live-store.js";
import { drawLanes, drawFirstTokens, drawAreas, forgetColours, hit } from "./live-draw.js";
import { ledgerView, missed } from "./ledger.js";

const RETRY_SECONDS = 2;
const STATES = { ready: "good", draining: "warn", lost: "bad", stopped: "bad" };

export function livePage(main) {
  const page = new LivePage(main);
  return {
    leave: () => page.leave(),
    shortcuts: {
      Space: ["Pause or go on", () => page.pause(!page.paused)],
      ArrowLeft: ["Five seconds back", () => page.scrub(-5)],
      ArrowRight: ["Five seconds on", () => page.scrub(5)],
      l: ["Latest", () => page.pause(false)],
    },
  };
}

class LivePage {
  constructor(main) {
    this.store = new LiveStore();
    this.end = null; // of what is shown; null: now
    this.span = 30;
    this.model = "";
    this.build(main);
    this.onTheme = () => { forgetColours(); this.drawSoon(); };
    this.onKey = () => { this.controller?.abort(); this.listen(); };
    this.onVisible = () => (document.hidden ? this.controller?.abort() : this.listen());
    document.addEventListener("themechange", this.onTheme);
    document.addEventListener("keychange", this.onKey);
    document.addEventListener("visibilitychange", this.onVisible);
    window.addEventListener("resize", this.onTheme);
    this.listen();
  }

  leave() {
    this.left = true;
    this.controller?.abort();
    document.removeEventListener("themechange", this.onTheme);
    document.removeEventListener("keychange", this.onKey);
    document.removeEventListener("visibilitychange", this.onVisible);
    window.removeEventListener("resize", this.onTheme);
  }

  build(main) {
    const canvas = (label, onclick) => h("canvas", { role: "img", "aria-label": label, onclick });
    const pick = (name) => (event) => { const track = hit(this[name] || [], event); if (track) this.open(track); };
    this.state = h("span", { class: "badge", role: "status" }, "connecting…");
    this.pauseButton = h("button", { type: "button", "aria-pressed": "false", onclick: () => this.pause(!this.paused) }, "Pause");
    this.slider = h("input", { type: "range", min: -KEEP_SECONDS, max: 0, step: 1, value: 0, "aria-label": "Time shown, in seconds before now", oninput: () => this.scrubTo(Number(this.slider.value)) });
    this.shown = h("span", { class: "small muted num" });
    this.modelSelect = h("select", { "aria-label": "Model", onchange: (event) => { this.model = event.target.value; this.drawSoon(); } }, h("option", { value: "" }, "All models"));
    const spanSelect = h("select", { "aria-label": "Span", onchange: (event) => { this.span = Number(event.target.value); this.drawSoon(); } },
      [[15, "15 s"], [30, "30 s"], [60, "1 min"], [120, "2 min"], [600, "10 min"]].map(([value, label]) => h("option", { value, selected: value === this.span }, label)));
    this.tiles = h("div", { class: "tiles" });
    this.lanes = canvas("Requests as lanes over time. The table of late and refused requests below has the same by keyboard.", pick("laneBoxes"));
    this.laneNote = h("small");
    this.processNote = h("small", { class: "muted", hidden: true });
    this.points = canvas("TTFT of requests by the time they arrived, with the objectives", pick("pointBoxes"));
    this.steps = canvas("Tokens of an average step over time: decode and prefill");
    this.kv = canvas("KV blocks in use over time");
    this.kvNote = h("small");
    this.classes = h("div", { class: "scroll" });
    this.late = h("div", { class: "scroll late" });
    this.replicas = h("div", { class: "scroll" });
    this.tenants = h("div", { class: "scroll" });
    const panel = (title, note, ...content) => h("section", { class: "panel", "aria-label": title }, h("h2", null, title, note), content);
    const key = (...names) => h("small", { class: "key" }, names.map(([name, label]) => h("span", null, h("i", { class: `swatch p-${name}` }), label)));
    main.append(h("div", { class: "live" },
      h("div", { class: "row controls" }, h("h1", { class: "visually-hidden" }, "Live"), this.state, this.modelSelect, spanSelect, this.pauseButton, this.slider, this.shown, this.processNote),
      this.problem = h("div", { class: "problem", hidden: true }),
      this.tiles,
      panel("Requests", [key(["waiting", "no token yet"], ["queued", "queued"], ["prefill", "prefill chunks"], ["decode", "decode"], ["stalled", "stalled"]), this.laneNote], this.lanes),
      h("div", { class: "grid" },
        panel("First tokens", h("small", null, "red: missed its objective; click for its ledger"), this.points),
        panel("Latencies by class", h("small", null, "over the span shown; ITL by token: of a chunk of several, its gap over their number, where the objective counts the whole gap"), this.classes),
        panel("Step composition", key(["decode", "decode"], ["prefill", "prefill"]), this.steps),
        panel("KV blocks", this.kvNote, this.kv),
        panel("Late, failed and refused", h("small", null, "latest first"), this.late),
        h("div", { class: "column" }, panel("Replicas", null, this.replicas),
          panel("Tenants", h("small", null, "since this gateway started"), this.tenants)))));
  }

  // ------------------------------------------------------------ the stream

  async listen() {
    const controller = this.controller = new AbortController();
    while (!this.left && !controller.signal.aborted) {
      try {
        const response = await send("/admin/live", { as: "admin", signal: controller.signal });
        this.say("live", "good");
        this.problem.hidden = true;
        for await (const data of events(response)) this.take(JSON.parse(data));
        this.say("the server ended the stream", "warn");
      } catch (error) {
        if (error.name === "AbortError") { this.say("not connected", ""); return; }
        this.say("not connected", "bad");
        this.showProblem(error);
        if (error instanceof ApiError && error.needsKey) return;
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_SECONDS * 1000));
    }
  }

  showProblem(error) {
    this.problem.hidden = false;
    const needsKey = error instanceof ApiError && error.needsKey;
    fill(this.problem, needsKey ? "Live needs the admin key, since this server has tenants." : explain(error),
      needsKey && h("button", { type: "button", class: "primary", onclick: () => document.dispatchEvent(new Event("askforkeys")) }, "Enter a key"));
  }

  say(text, kind) {
    this.connection = text;
    fill(this.state, this.paused ? "paused" : text);
    this.state.className = `badge ${this.paused ? "warn" : kind}`;
  }

  take(message) {
    if (message.classes) {
      this.store.begin(message);
      fill(this.modelSelect, h("option", { value: "" }, "All models"), Object.keys(message.classes).map((name) => h("option", { value: name, selected: name === this.model }, name)));
      this.processNote.hidden = message.processes < 2;
      this.processNote.textContent = `requests of one of ${message.processes} gateway processes`;
      this.modelSelect.hidden = Object.keys(message.classes).length < 2;
    } else {
      this.store.add(message);
    }
    if (!this.paused) this.drawSoon();
  }

  // ------------------------------------------------------------ time

  get paused() { return this.end !== null; }

  pause(is) {
    this.end = is ? this.end ?? this.store.now : null;
    this.pauseButton.setAttribute("aria-pressed", String(is));
    this.pauseButton.textContent = is ? "Go on" : "Pause";
    if (!is) this.slider.value = "0";
    this.say(this.connection, "good");
    this.drawSoon();
  }

  scrub(seconds) { this.scrubTo(Math.min(0, (this.end ?? this.store.now) - this.store.now + seconds)); }

  scrubTo(before) {
    this.end = this.store.now + Math.max(-KEEP_SECONDS, before);
    this.slider.value = String(before);
    this.pause(true);
  }

  // ------------------------------------------------------------ drawing

  drawSoon() {
    this.pending ??= requestAnimationFrame(() => { this.pending = undefined; if (!this.left) this.draw(); });
  }

  draw() {
    const { store, model } = this;
    const now = store.now;
    const end = this.end ?? now;
    const start = end - this.span;
    const frames = store.between(start, end);
    const tracks = store.tracksBetween(start, end, model);
    this.shown.textContent = `${clock(start)} – ${clock(end)}`;
    const { boxes, hidden } = drawLanes(this.lanes, tracks, start, end, Math.min(now, end), matchMedia("(max-width: 700px)").matches ? 12 : 18, this.selected);
    this.laneBoxes = boxes;
    this.laneNote.textContent = hidden || store.missing ? `${hidden ? `${hidden} more in this span` : ""}${store.missing ? ` ${store.missing} not sent` : ""}` : "";
    const found = latencies(frames, model, store.hello);
    const promised = [...found].filter(([, { card }]) => card?.ttft_ms).map(([name, { card }]) => [name, card.ttft_ms / 1000]);
    this.pointBoxes = drawFirstTokens(this.points, tracks, start, end, promised, this.selected);
    drawAreas(this.steps, composition(frames, model), start, end, ["c-decode", "c-prefill"]);
    const readings = frames.map((frame) => ({ at: frame.at, ...reading(frame, model) }));
    drawAreas(this.kv, readings.map(({ at, kv_blocks_used: used }) => ({ at, values: [used] })), start, end, ["c-decode"], readings.at(-1)?.kv_blocks || 1);
    this.drawTiles(readings.at(-1), rates(frames, model), frames.at(-1), start, end);
    this.drawClasses(found);
    this.drawLate(tracks, start, end);
    this.drawReplicas();
    this.drawTenants();
  }

  drawTiles(last, per, frame, start, end) {
    const tile = (label, value, note, kind = "") => h("div", { class: "tile" }, h("span", { class: "small muted" }, label), h("b", { class: kind }, value), h("span", { class: "small muted" }, note));
    if (!last) { fill(this.tiles, h("p", { class: "muted" }, "Waiting for the first reading.")); return; }
    this.kvNote.textContent = `${count(last.kv_blocks_used)} of ${count(last.kv_blocks)} in use`;
    const refused = this.store.refusals.filter(({ at }) => at >= start && at <= end).length;
    fill(this.tiles,
      tile("Running", count(last.running), `${count(frame.inFlight)} at the gateway`),
      tile("Waiting", count(last.waiting), `${count(last.prefill_tokens)} tokens to prefill`, last.waiting > last.running && last.waiting > 8 ? "warn" : ""),
      tile("Output", `${rate(per.output)} tok/s`, `${rate(per.steps)} steps/s`),
      tile("Prefill", `${rate(per.prefill)} tok/s`, `${count(last.prompt_tokens)} in all`),
      tile("KV cache", percent(last.kv_blocks_used, last.kv_blocks), `${count(last.preemptions)} preemptions`),
      tile("Prefix hits", percent(last.cached_tokens, last.prompt_tokens), "of prompt tokens"),
      tile("Refused", count(refused), `${count(last.refused)} by engines in all`, refused > 0 ? "bad" : ""));
  }

  drawClasses(found) {
    const bounds = { ttft: this.store.hello?.ttft_buckets, itl: this.store.hello?.itl_buckets };
    const rows = [...found].flatMap(([name, classes]) => ["ttft", "itl"].map((kind, index) => {
      const objective = classes.card?.[`${kind}_ms`];
      const [p50, p95, p99] = [0.5, 0.95, 0.99].map((share) => quantile(classes[kind], bounds[kind], share));
      const over = objective && p99 !== null && p99 * 1000 > objective;
      return h("tr", null, h("td", null, index ? "" : name), h("td", null, kind === "ttft" ? "TTFT" : "ITL"),
        [p50, p95, p99].map((value, at) => h("td", { class: `num ${at === 2 && over ? "bad" : ""}` }, duration(value))),
        h("td", { class: "num" }, objective ? duration(objective / 1000) : "none"),
        h("td", null, objective && p99 !== null && h("span", { class: `badge ${over ? "bad" : "good"}` }, over ? "over" : "within")));
    }));
    fill(this.classes, table(["Class", "", "#p50", "#p95", "#p99", "#objective", ""], rows, "No requests yet."));
  }

  drawLate(tracks, start, end) {
    const late = tracks.filter((track) => track.account && missed(track.account) && track.account.status < 400)
      .map((track) => ({ at: track.arrived, tenant: track.tenant, what: whatIsLate(track.account), track }));
    const refused = this.store.refusals.filter(({ at }) => at >= start && at <= end)
      .map(({ at, tenant, status, why, id }) => ({ at, tenant, what: `${status}: ${why}`, track: id && this.store.tracks.get(id) }));
    const all = [...late, ...refused].sort((one, other) => other.at - one.at).slice(0, 12);
    const shown = all.map(({ at, what }) => `${at} ${what}`).join("\n");
    if (shown === this.lateShown) return; // so that the focus stays where it is
    this.lateShown = shown;
    fill(this.late, table(["At", "Tenant", "What"], all.map(({ at, tenant, what, track }) => {
      const open = track && (() => this.open(track));
      return h("tr", { class: track ? "pick" : "", onclick: open }, h("td", null, clock(at)), h("td", null, tenant || "–"),
        h("td", { class: "what" }, track ? h("button", { type: "button", class: "link", onclick: (event) => { event.stopPropagation(); open(); } }, what) : what));
    }), "None in this span."));
  }

  drawReplicas() {
    fill(this.replicas, table(["Replica", "State", "#Streams", "#Running", "#Waiting", "#KV", "#Restarts"], this.store.replicas.map((one) => h("tr", { title: one.detail },
      h("td", null, one.id), h("td", null, h("span", { class: `badge ${one.open_circuit ? "bad" : STATES[one.state] || ""}` }, one.open_circuit ? "circuit open" : one.state)),
      [one.streams, one.running, one.waiting].map((value) => h("td", { class: "num" }, count(value))),
      h("td", { class: "num" }, percent(one.kv_blocks_used, one.kv_blocks)), h("td", { class: "num" }, one.restarts))), "This gateway has no replicas of its own."));
  }

  drawTenants() {
    fill(this.tenants, table(["Tenant", "#Requests", "#Tokens", "#Spent", "#Day's budget", "#Limited"], this.store.tenants.map((one) => h("tr", null,
      h("td", null, one.name || "everybody"), h("td", { class: "num" }, count(one.requests)), h("td", { class: "num" }, count(one.tokens)),
      h("td", { class: "num" }, money(one.cost)), h("td", { class: "num" }, one.budget_per_day === null ? "none" : money(one.budget_per_day)),
      h("td", { class: `num ${one.limited ? "bad" : ""}` }, count(one.limited)))), "No requests yet."));
  }

  // ------------------------------------------------------------ one request

  async open(track) {
    this.selected = track.id;
    const { account } = track;
    const link = (id) => {
      const other = this.store.tracks.get(id.split("-")[0]);
      return other && h("button", { type: "button", class: "link mono", onclick: () => { document.querySelector("dialog")?.close(); this.open(other); } }, other.id.slice(0, 8));
    };
    if (!this.paused) this.pause(true);
    await openDialog(`Request ${track.id.slice(0, 8)}`, (close) => h("div", { class: "stack" },
      h("div", { class: "ledger-facts small" }, h("span", null, h("b", null, track.model)), h("span", null, `class ${track.objective || "–"}`), h("span", null, `tenant ${track.tenant || "–"}`), h("span", null, `arrived ${clock(track.arrived)}`), account && h("span", { class: account.status < 400 ? "" : "bad" }, `status ${account.status}`)),
      account ? ledgerView(account, { open: true, link }) : h("p", null, `Still running: ${track.samples.at(-1)?.[1] ?? 0} tokens so far. Its ledger comes when it ends.`),
      h("div", { class: "buttons" }, h("button", { type: "button", autofocus: true, onclick: () => close() }, "Close"))), { wide: true });
    this.drawSoon();
  }
}

function whatIsLate(account) {
  const { met_ttft: ttft, met_gap: gap } = account.choices[0].engine;
  return [ttft === false && `TTFT ${duration(account.ttft)}`, gap === false && "ITL over its objective"].filter(Boolean).join(", ");
}

// Headings that begin with # are of numbers.
export function table(headings, rows, empty) {
  if (!rows.length) return h("p", { class: "empty small" }, empty);
  return h("table", null, h("thead", null, h("tr", null, headings.map((name) => h("th", { class: name.startsWith("#") ? "num" : "", scope: "col" }, name.replace("#", ""))))), h("tbody", null, rows));
}
