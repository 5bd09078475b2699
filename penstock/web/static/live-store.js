// What the live page remembers: frames, requests and refusals of the last ten minutes, each in a ring of fixed size.

export const KEEP_SECONDS = 600;
export const MAX_FRAMES = 2400; // ten minutes of four frames a second
export const MAX_TRACKS = 2000; // requests
export const MAX_SAMPLES = 240; // of the tokens of one request; every second one is dropped when they are full
const MAX_REFUSALS = 200;

const COUNTERS = ["steps", "output_tokens", "batch_tokens", "batch_sequences", "prompt_tokens", "cached_tokens", "refused", "expired", "preemptions"];
const GAUGES = ["running", "waiting", "kv_blocks", "kv_blocks_used", "prefill_tokens"];

export class LiveStore {
  constructor() {
    this.hello = null;
    this.frames = []; // { at, inFlight, engines, latencies }
    this.tracks = new Map(); // by id, oldest first: { id, tenant, objective, model, arrived, submitted, first, samples, account }
    this.refusals = [];
    this.replicas = [];
    this.tenants = [];
    this.caches = null;
    this.missing = 0; // requests that ended and were not in a frame
  }

  begin(hello) {
    this.hello = hello;
    for (const account of hello.backlog) this.ended(account);
    hello.backlog = [];
  }

  add(frame) {
    this.frames.push({ at: frame.at, inFlight: frame.in_flight, engines: frame.engines, latencies: frame.latencies });
    if (this.frames.length > MAX_FRAMES) this.frames.splice(0, this.frames.length - MAX_FRAMES);
    for (const [id, tenant, objective, model, arrived, submitted, first, promptTokens, outputTokens] of frame.running) {
      const track = this.track(id, { id, tenant, objective, model, arrived, promptTokens, samples: [] });
      Object.assign(track, { submitted, first, seen: frame.at });
      if (outputTokens !== (track.samples.at(-1)?.[1] ?? 0)) track.samples.push([frame.at, outputTokens]);
      if (track.samples.length > MAX_SAMPLES) track.samples = track.samples.filter((_, index) => index % 2);
    }
    for (const account of frame.ended || []) this.ended(account);
    this.missing += frame.ended_more || 0;
    for (const refusal of frame.refused || []) this.refuse(refusal);
    if (frame.replicas) this.replicas = frame.replicas;
    if (frame.tenants) this.tenants = frame.tenants;
    if (frame.caches) this.caches = frame.caches;
  }

  track(id, fresh) {
    let track = this.tracks.get(id);
    if (!track) {
      this.tracks.set(id, track = fresh);
      if (this.tracks.size > MAX_TRACKS) this.tracks.delete(this.tracks.keys().next().value);
    }
    return track;
  }

  ended(account) {
    const { id, tenant, objective, model, arrived } = account;
    const track = this.track(id, { id, tenant, objective, model, arrived, promptTokens: account.prompt_tokens, samples: [] });
    track.account = account;
    track.first = account.ttft === null ? null : arrived + account.ttft;
    if (account.status >= 400 && account.status !== 499) {
      this.refuse({ at: arrived + account.total, status: account.status, endpoint: account.endpoint, tenant, why: account.error || "", id });
    }
  }

  refuse(refusal) {
    this.refusals.push(refusal);
    if (this.refusals.length > MAX_REFUSALS) this.refusals.shift();
  }

  get now() { return this.frames.at(-1)?.at ?? Date.now() / 1000; }
  get oldest() { return this.frames[0]?.at ?? this.now; }

  // The frames of a span, with one before it to take differences from.
  between(start, end) {
    const { frames } = this;
    let low = 0;
    while (low < frames.length && frames[low].at < start) low += 1;
    let high = frames.length;
    while (high > low && frames[high - 1].at > end) high -= 1;
    return frames.slice(Math.max(0, low - 1), high);
  }

  // `model` "": all of them.
  tracksBetween(start, end, model) {
    return [...this.tracks.values()].filter((track) => track.arrived < end && endOf(track, this.now) > start && (!model || track.model === model));
  }
}

// When a request ended; of one that runs: now. One that is gone from the frames without an account: when it was last seen.
export function endOf(track, now) {
  if (track.account) return track.arrived + track.account.total;
  return track.seen !== undefined && track.seen < now - 2 ? track.seen : now;
}

// The sum of the engines' readings.
export function reading(frame, model) {
  const sum = {};
  for (const name of [...COUNTERS, ...GAUGES]) sum[name] = 0;
  for (const [name, stats] of Object.entries(frame.engines)) {
    if (!model || name === model) for (const field of Object.keys(sum)) sum[field] += stats[field];
  }
  return sum;
}

// What happened a second, over the last `seconds` of these frames.
export function rates(frames, model, seconds = 2) {
  const last = frames.at(-1);
  const first = last && frames.find((frame) => frame.at >= last.at - seconds - 0.05);
  const span = last && first ? last.at - first.at : 0;
  if (!(span > 0)) return { output: 0, prefill: 0, steps: 0, refused: 0 };
  const [from, to] = [reading(first, model), reading(last, model)];
  const change = (name) => Math.max(0, to[name] - from[name]) / span;
  const output = change("output_tokens");
  return { output, prefill: Math.max(0, change("batch_tokens") - output), steps: change("steps") };
}

// Points over time of what an average step held: tokens of prompts and of answers.
export function composition(frames, model) {
  const points = [];
  for (let index = 1; index < frames.length; index += 1) {
    const [from, to] = [reading(frames[index - 1], model), reading(frames[index], model)];
    const steps = to.steps - from.steps;
    const decode = steps > 0 ? Math.max(0, to.output_tokens - from.output_tokens) / steps : 0;
    const all = steps > 0 ? Math.max(0, to.batch_tokens - from.batch_tokens) / steps : 0;
    points.push({ at: frames[index].at, values: [decode, Math.max(0, all - decode)] });
  }
  return points;
}

// Per class: percentiles over the span, from the difference of two histograms.
export function latencies(frames, model, hello) {
  const found = new Map();
  const [first, last] = [frames[0], frames.at(-1)];
  if (!last || !hello) return found;
  for (const [name, classes] of Object.entries(last.latencies)) {
    if (model && name !== model) continue;
    for (const [objective, { ttft, itl }] of Object.entries(classes)) {
      const before = first.latencies[name]?.[objective];
      const into = found.get(objective) || { ttft: ttft.map(() => 0), itl: itl.map(() => 0), card: hello.classes[name]?.[objective] };
      ttft.forEach((value, index) => { into.ttft[index] += value - (before?.ttft[index] ?? 0); });
      itl.forEach((value, index) => { into.itl[index] += value - (before?.itl[index] ?? 0); });
      found.set(objective, into);
    }
  }
  return found;
}

// A quantile of a histogram, interpolated within its bucket. null: nothing was observed.
export function quantile(counts, bounds, share) {
  const total = counts.reduce((sum, value) => sum + value, 0);
  if (!total) return null;
  let left = share * total;
  for (let index = 0; index < counts.length; index += 1) {
    if (left <= counts[index]) {
      const low = index ? bounds[index - 1] : 0;
      return index < bounds.length ? low + (bounds[index] - low) * (left / counts[index]) : low;
    }
    left -= counts[index];
  }
  return bounds.at(-1);
}
