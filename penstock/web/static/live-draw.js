// Drawing on canvases: lanes of requests, points of first tokens, areas over time.

import { duration, count } from "./dom.js";
import { missed } from "./ledger.js";
import { endOf } from "./live-store.js";

const LANE = 16; // px
const GAP = 4;
const AXIS = 18;
let colours = {};

// Colours of the theme, as the browser computes them.
export function colour(name) {
  if (!colours[name]) {
    const probe = document.createElement("span");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    colours[name] = getComputedStyle(probe).color;
    probe.remove();
  }
  return colours[name];
}

export function forgetColours() { colours = {}; }

function begin(canvas, height) {
  const width = canvas.clientWidth;
  const scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  return [context, width];
}

function timeAxis(context, width, height, start, end, left = 0) {
  const span = end - start;
  const step = [1, 2, 5, 10, 15, 30, 60, 120, 300].find((seconds) => span / seconds <= Math.max(3, width / 110)) || 300;
  const toX = (at) => left + (at - start) / span * (width - left);
  context.fillStyle = colour("muted");
  context.strokeStyle = colour("line");
  context.lineWidth = 1;
  for (let at = Math.ceil(start / step) * step; at <= end; at += step) {
    const x = Math.round(toX(at)) + 0.5;
    context.beginPath();
    context.moveTo(x, 0);
    context.lineTo(x, height - AXIS);
    context.stroke();
    const label = new Date(at * 1000).toLocaleTimeString([], { hour12: false });
    if (x > left + 24 && x < width - 28) { context.textAlign = "center"; context.fillText(label, x, height - AXIS / 2); }
  }
  return toX;
}

// ------------------------------------------------------------ lanes

// Each request gets the first lane that is free. Returns what was drawn where, for clicks.
export function drawLanes(canvas, tracks, start, end, now, maxLanes, selected) {
  const sorted = tracks.slice().sort((one, other) => one.arrived - other.arrived);
  const free = [];
  const placed = [];
  const gap = (end - start) / 200;
  let hidden = 0;
  for (const track of sorted) {
    let lane = free.findIndex((until) => until <= track.arrived);
    if (lane < 0 && free.length < maxLanes) lane = free.push(0) - 1;
    if (lane < 0) { hidden += 1; continue; }
    free[lane] = endOf(track, now) + gap;
    placed.push({ track, lane });
  }
  const height = Math.max(6, Math.min(maxLanes, free.length)) * (LANE + GAP) + GAP + AXIS;
  const [context, width] = begin(canvas, height);
  const toX = timeAxis(context, width, height, start, end);
  const boxes = placed.map(({ track, lane }) => {
    const box = { track, x: toX(track.arrived), end: toX(Math.min(end, endOf(track, now))), y: GAP + lane * (LANE + GAP) };
    drawTrack(context, toX, track, box.y, Math.min(end, now));
    if (track.id === selected) { context.strokeStyle = colour("text"); context.lineWidth = 2; context.strokeRect(box.x - 1, box.y - 1, box.end - box.x + 2, LANE + 2); }
    return box;
  });
  return { boxes, hidden };
}

function drawTrack(context, toX, track, y, now) {
  const piece = (from, to, name, inset = 0) => {
    const [x, end] = [Math.round(toX(from)), Math.round(toX(to))];
    if (end <= 0 || to <= from) return;
    context.fillStyle = colour(name);
    context.fillRect(x, y + inset, Math.max(1, end - x), LANE - 2 * inset);
  };
  const { account } = track;
  if (!account) {
    const submitted = track.submitted ?? now;
    piece(track.arrived, submitted, "c-prepare", 5);
    piece(submitted, track.first ?? now, "c-waiting", 4); // how much of it was queueing is known when it has ended
    if (track.first !== null) piece(track.first, now, "c-decode", 2);
  } else {
    const parts = account.choices[0]?.parts ?? {};
    let at = track.arrived;
    for (const [name, inset] of [["prepare", 5], ["held", 4], ["cascade", 4], ["queued", 4], ["failover", 4], ["answer", 3]]) {
      piece(at, at + (parts[name] || 0), `c-${name}`, inset);
      at += parts[name] || 0;
    }
    for (const chunk of account.choices[0]?.engine?.prefill ?? []) {
      piece(at, at + chunk.seconds, "c-prefill", 1);
      const [from, to] = [toX(at), toX(at + chunk.seconds)];
      if (to - from > 3) context.clearRect(Math.round(to) - 1, y, 1, LANE); // between chunks
      at += chunk.seconds;
    }
    const end = track.arrived + account.total - Math.max(0, parts.relay || 0);
    piece(at, Math.max(at, end), "c-decode", 2);
    const computed = (parts.decode || 0) + (parts.stalled || 0);
    if (parts.stalled > 0 && computed > 0) {
      const share = parts.stalled / computed; // when it stalled is not kept, so the share is drawn as a height
      context.fillStyle = colour("c-stalled");
      context.fillRect(toX(at), y + 2, Math.max(1, toX(end) - toX(at)), (LANE - 4) * share);
    }
    if (missed(account)) {
      context.strokeStyle = colour("bad");
      context.lineWidth = 1.5;
      context.strokeRect(toX(track.arrived), y + 0.75, Math.max(3, toX(track.arrived + account.total) - toX(track.arrived)), LANE - 1.5);
    }
  }
  context.fillStyle = colour("bg");
  for (const [at] of track.samples) context.fillRect(toX(at) - 0.5, y + LANE - 6, 1, 4);
}

// ------------------------------------------------------------ first tokens

// TTFT over the time of arrival, on a logarithmic scale, with the objectives as lines.
export function drawFirstTokens(canvas, tracks, start, end, objectives, selected) {
  const height = 200;
  const [context, width] = begin(canvas, height);
  const left = 48;
  const toX = timeAxis(context, width, height, start, end, left);
  const [low, high] = [0.002, 30];
  const toY = (seconds) => (height - AXIS - 22) * (1 - Math.log(Math.min(high, Math.max(low, seconds)) / low) / Math.log(high / low)) + 20;
  context.textAlign = "right";
  for (const mark of [0.01, 0.1, 1, 10]) {
    context.fillStyle = colour("muted");
    context.fillText(duration(mark), left - 6, toY(mark));
    context.strokeStyle = colour("line");
    context.lineWidth = 1;
    context.strokeRect(left, Math.round(toY(mark)) + 0.5, width - left, 0);
  }
  context.fillStyle = colour("bad");
  context.fillText("refused", left - 6, 8);
  context.setLineDash([4, 4]);
  for (const [name, seconds] of objectives) {
    context.strokeStyle = context.fillStyle = colour("warn");
    context.strokeRect(left, Math.round(toY(seconds)) + 0.5, width - left, 0);
    context.textAlign = "left";
    context.fillText(`${name} ${duration(seconds)}`, left + 4, toY(seconds) - 8);
  }
  context.setLineDash([]);
  const boxes = [];
  for (const track of tracks) {
    const bad = track.account ? missed(track.account) : false;
    const seconds = track.first ? track.first - track.arrived : null;
    if ((seconds === null && !bad) || track.arrived < start || track.arrived > end) continue;
    const [x, y] = [toX(track.arrived), seconds === null ? 8 : toY(seconds)];
    context.fillStyle = colour(bad ? "bad" : "accent");
    context.globalAlpha = bad ? 1 : 0.65;
    context.beginPath();
    context.arc(x, y, bad ? 4.5 : 3, 0, 7);
    context.fill();
    context.globalAlpha = 1;
    if (track.id === selected) { context.strokeStyle = colour("text"); context.lineWidth = 2; context.beginPath(); context.arc(x, y, 7, 0, 7); context.stroke(); }
    boxes.push({ track, x, y });
  }
  return boxes;
}

// ------------------------------------------------------------ areas

// Stacked areas. `points`: [{ at, values }]. `most`: top of the scale; null: the largest sum.
export function drawAreas(canvas, points, start, end, names, most = null) {
  const height = 120;
  const [context, width] = begin(canvas, height);
  const left = 48;
  const toX = timeAxis(context, width, height, start, end, left);
  const top = Math.max(most ?? 0, most === null ? Math.max(1, ...points.map(({ values }) => values.reduce((sum, value) => sum + value, 0))) : 1);
  const bottom = height - AXIS;
  const toY = (value) => bottom - value / top * (bottom - 8);
  context.fillStyle = colour("muted");
  context.textAlign = "right";
  context.fillText(count(top), left - 6, 8);
  context.fillText("0", left - 6, bottom - 4);
  const base = points.map(() => 0);
  names.forEach((name, series) => {
    if (points.length < 2) return;
    context.beginPath();
    points.forEach(({ at, values }, index) => context.lineTo(toX(at), toY(base[index] + values[series])));
    for (let index = points.length - 1; index >= 0; index -= 1) context.lineTo(toX(points[index].at), toY(base[index]));
    context.closePath();
    context.fillStyle = colour(name);
    context.globalAlpha = 0.85;
    context.fill();
    context.globalAlpha = 1;
    points.forEach(({ values }, index) => { base[index] += values[series]; });
  });
}

export function hit(boxes, event) {
  const { left, top } = event.target.getBoundingClientRect();
  const [x, y] = [event.clientX - left, event.clientY - top];
  return boxes.findLast((box) => (box.end === undefined ? Math.hypot(box.x - x, box.y - y) < 9
    : x >= box.x - 2 && x <= Math.max(box.end, box.x + 4) + 2 && y >= box.y && y <= box.y + LANE))?.track;
}
