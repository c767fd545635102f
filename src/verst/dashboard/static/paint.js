// The timeline's canvas: a ruler, lanes of workers, rows of microgroups; only what is visible is drawn.

import { time } from "./dom.js";
import { ticks } from "./chart.js";
import { STAGES, idle, lowerBound, packed, setDepths, touching } from "./lanes.js";

const GUTTER = 148;
const RULER = 24;
const BAR = 12;
const LANE_GAP = 8;
const ROW = 9;
const LEAST_HEIGHT = 140;
const MOST_HEIGHT = 640;
/** Lanes that take more of the canvas than this scroll together with the microgroups. */
const MOST_PINNED = 0.6;
/** Pixels: a narrower gap is not marked, a narrower span is drawn this wide, text needs this much. */
const LEAST_GAP = 5;
const LEAST_SPAN = 0.7;
const TEXT_WIDTH = 46;

/** [label, names of spans, one of them]: what has one colour. */
export const COLOURS = [
  ["generate, denoise", ["generate", "denoise", "rollout", "request"], "--c0"],
  ["encode, evaluate", ["encode", "evaluate"], "--c6"],
  ["decode, advantages", ["decode", "advantages"], "--c2"],
  ["deserialize, parse", ["deserialize", "parse"], "--c3"],
  ["reward, score", ["reward", "score"], "--c1"],
  ["train", ["train"], "--c4"],
  ["sync", ["sync", "publish", "update"], "--c5"],
  ["transfer, checkpoint", ["transfer", "ship", "checkpoint"], "--c7"],
  ["waiting", ["wait", "iteration"], "--line"],
].map(([label, names, variable]) => [label, names, names[0], variable]);
const OF_NAME = new Map(COLOURS.flatMap(([, names, , variable]) => names.map((name) => [name, variable])));

export function colourOf(name) {
  return OF_NAME.get(name) ?? (/wait|queue|drain/.test(name) ? "--line" : "--muted");
}

export class Painter {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.scroll = 0;
    /** As it was painted: to ask the canvas makes the browser lay the page out. */
    this.width = 600;
    this.contentHeight = 0;
    this.lanesHeight = 0;
    this.height = LEAST_HEIGHT;
  }

  get plotWidth() {
    return Math.max(50, this.width - GUTTER);
  }

  share(x) {
    return Math.min(1, Math.max(0, (x - GUTTER) / this.plotWidth));
  }

  /** True where there was anywhere to go. */
  scrollTo(y) {
    const before = this.scroll;
    const room = this.height - RULER - (this.pinned ? this.lanesHeight : 0);
    this.scroll = Math.max(0, Math.min(y, this.contentHeight - room));
    return this.scroll !== before;
  }

  paint(spans, [from, to], layout) {
    this.from = from;
    this.to = to;
    this.arrange(spans, layout);
    this.fit();
    this.readColours();
    const { context } = this;
    context.clearRect(0, 0, this.width, this.height);
    let y = this.lanesTop;
    this.clipped(RULER, () => {
      for (const lane of this.lanes) {
        const height = lane.depth * BAR + LANE_GAP;
        if (y + height > RULER && y < this.height) this.lane(lane, y);
        y += height;
      }
    });
    this.clipped(Math.max(RULER, this.pinned ? y : 0), (top) => {
      const first = Math.max(0, Math.floor((top - this.rowsTop) / ROW));
      const last = Math.min(this.rows.length, Math.ceil((this.height - this.rowsTop) / ROW));
      for (let i = first; i < last; i++) this.row(this.rows[i], this.rowsTop + i * ROW);
      context.fillStyle = this.colours["--muted"];
      if (this.rows.length) context.fillText("microgroups", 8, Math.max(top + 12, this.rowsTop + 12));
    });
    this.ruler();
  }

  clipped(top, draw) {
    this.context.save();
    this.context.beginPath();
    this.context.rect(0, top, this.width, this.height - top);
    this.context.clip();
    draw(top);
    this.context.restore();
  }

  get lanesTop() {
    return RULER - (this.pinned ? 0 : this.scroll);
  }

  get rowsTop() {
    return RULER + this.lanesHeight - this.scroll;
  }

  /** Lanes and rows of what is drawn; anew only where that is another. */
  arrange(spans, layout) {
    const changed = this.spans !== spans || this.order !== spans.order || !spans.order;
    if (changed) {
      this.spans = spans;
      this.lanes = spans.lanes();
      this.order = spans.order;
      this.lanes.forEach(setDepths);
      this.lanesHeight = this.lanes.reduce((sum, lane) => sum + lane.depth * BAR + LANE_GAP, 0);
      this.packed = packed(spans.rows());
    }
    const all = spans.rows();
    const inside = (item) => item.end >= this.from && item.start <= this.to;
    this.rows = layout === "packed" ? this.packed : all.filter(inside).map((item) => [item]);
    const rowsHeight = this.rows.length * ROW + 12;
    if (changed || layout !== this.layout) {
      // Of one layout the height is one, or the page would jump under a hand that scrolls.
      const whole = this.lanesHeight + (layout === "packed" ? rowsHeight : all.length * ROW) + RULER;
      this.height = Math.round(Math.min(MOST_HEIGHT, Math.max(LEAST_HEIGHT, whole)));
      this.layout = layout;
    }
    this.pinned = this.lanesHeight < MOST_PINNED * this.height;
    this.contentHeight = (this.pinned ? 0 : this.lanesHeight) + rowsHeight;
    this.scrollTo(this.scroll);
  }

  fit() {
    const ratio = window.devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    const width = Math.round(this.width * ratio);
    if (this.canvas.width === width && this.canvas.height === Math.round(this.height * ratio)) return;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = width;
    this.canvas.height = Math.round(this.height * ratio);
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.font = "11px system-ui, 'Open Sans', sans-serif";
  }

  /** A canvas knows no variables: an element is asked what they are in this theme. */
  readColours() {
    const theme = document.documentElement.dataset.theme + matchMedia("(prefers-color-scheme: dark)").matches;
    if (theme === this.theme) return;
    this.theme = theme;
    this.colours = {};
    const probe = document.createElement("span");
    this.canvas.after(probe);
    for (const name of ["--ink", "--muted", "--line", "--card", ...new Set(OF_NAME.values())]) {
      probe.style.color = `var(${name})`;
      this.colours[name] = getComputedStyle(probe).color;
    }
    probe.remove();
    const tile = new OffscreenCanvas(6, 6);
    const pen = tile.getContext("2d");
    pen.strokeStyle = this.colours["--line"];
    pen.beginPath();
    for (const at of [-6, 0, 6]) {
      pen.moveTo(at, 6);
      pen.lineTo(at + 6, 0);
    }
    pen.stroke();
    this.hatch = this.context.createPattern(tile, "repeat");
  }

  x(us) {
    return GUTTER + ((us - this.from) / (this.to - this.from)) * this.plotWidth;
  }

  lane(lane, y) {
    const { context } = this;
    const height = lane.depth * BAR;
    const scale = this.plotWidth / (this.to - this.from);
    const { busy, gaps } = idle(lane, this.from, this.to, LEAST_GAP / scale);
    if (lane.works) this.gaps(gaps, y, height, scale);
    const [first, last] = touching(lane, this.from, this.to);
    this.bars(lane.spans, first, last, (span) => y + span.depth * BAR, BAR - 1);
    context.fillStyle = this.colours["--card"];
    context.fillRect(0, y - 1, GUTTER - 4, height + LANE_GAP);
    context.fillStyle = this.colours["--ink"];
    context.fillText(lane.name, 8, y + 9, GUTTER - 58);
    context.fillStyle = this.colours["--muted"];
    context.textAlign = "right";
    if (lane.works) context.fillText(`${Math.round(100 * busy)} %`, GUTTER - 10, y + 9);
    context.textAlign = "left";
  }

  gaps(gaps, y, height, scale) {
    const { context } = this;
    context.fillStyle = this.hatch;
    for (const [start, end] of gaps) context.fillRect(this.x(start), y, (end - start) * scale, height);
    for (const [start, end] of gaps) {
      const text = time(Number((end - start).toPrecision(3)));
      if ((end - start) * scale > TEXT_WIDTH + 14) this.label(text, (this.x(start) + this.x(end)) / 2, y + height / 2 + 4);
    }
  }

  label(text, x, y) {
    const { context } = this;
    context.textAlign = "center";
    const width = context.measureText(text).width + 6;
    context.fillStyle = this.colours["--card"];
    context.fillRect(x - width / 2, y - 10, width, 12);
    context.fillStyle = this.colours["--muted"];
    context.fillText(text, x, y);
    context.textAlign = "left";
  }

  /** A span that would fall on pixels that one of its name has just filled is left out. */
  bars(spans, first, last, top, height) {
    const { context } = this;
    const scale = this.plotWidth / (this.to - this.from);
    const filled = new Map();
    for (let i = first; i < last; i++) {
      const span = spans[i];
      if (span.end < this.from || span.start > this.to) continue;
      const left = Math.max(GUTTER, this.x(span.start));
      const right = Math.min(GUTTER + this.plotWidth, this.x(span.end));
      const y = top(span);
      if (right - left < 1 && right <= (filled.get(y) ?? -1)) continue;
      filled.set(y, Math.ceil(right));
      const colour = colourOf(span.name);
      context.fillStyle = this.colours[colour];
      context.fillRect(left, y, Math.max(LEAST_SPAN, right - left), height);
      if ((span.end - span.start) * scale > TEXT_WIDTH && height > 9 && right - left > TEXT_WIDTH) {
        context.fillStyle = this.colours[colour === "--line" ? "--ink" : "--card"];
        context.fillText(span.name, left + 4, y + height - 1.5, right - left - 6);
      }
    }
  }

  row(items, y) {
    const first = lowerBound(items, this.from, (item) => item.end);
    for (let i = first; i < items.length && items[i].start <= this.to; i++) {
      const spans = items[i].spans;
      this.bars(spans, 0, spans.length, (span) => y + (STAGES.has(span.name) ? 0 : 3), ROW - 4);
    }
  }

  ruler() {
    const { context } = this;
    context.fillStyle = this.colours["--card"];
    context.fillRect(0, 0, this.width, RULER);
    context.fillStyle = this.colours["--muted"];
    context.textAlign = "center";
    const marks = timeTicks(this.from, this.to, Math.max(2, Math.floor(this.plotWidth / 110)));
    // Deep inside a run the marks count from the first one, which is written out.
    const base = this.to - this.from < Math.abs(this.from) / 100 ? marks[0] : 0;
    for (const at of marks) {
      if (this.x(at) < GUTTER) continue;
      const text = !base ? clock(at, marks[1] - marks[0]) : at === base ? `at ${(at / 1e6).toFixed(6)} s` : `+${time(at - base)}`;
      context.fillText(text, Math.max(this.x(at), GUTTER + (at === base && base ? 40 : 0)), 15);
      context.fillRect(this.x(at), RULER - 4, 1, 4);
    }
    context.textAlign = "left";
    context.fillRect(GUTTER, RULER - 1, this.plotWidth, 1);
  }

  /** The narrowest span at this place of the canvas; null where there is none. */
  hit(x, y) {
    if (!this.lanes || x < GUTTER || y < RULER) return null;
    const at = this.from + ((x - GUTTER) / this.plotWidth) * (this.to - this.from);
    const slack = (1.5 / this.plotWidth) * (this.to - this.from);
    const narrowest = (spans) =>
      spans
        .filter((span) => span.start - slack <= at && span.end + slack >= at)
        .reduce((best, span) => (!best || span.end - span.start < best.end - best.start ? span : best), null);
    let top = this.lanesTop;
    for (const lane of this.lanes) {
      const height = lane.depth * BAR + LANE_GAP;
      if (y >= top && y < top + height) {
        const [first, last] = touching(lane, at - slack, at + slack);
        const depth = Math.floor((y - top) / BAR);
        const here = lane.spans.slice(first, last);
        return narrowest(here.filter((span) => span.depth === depth)) ?? narrowest(here);
      }
      top += height;
    }
    const row = this.rows[Math.floor((y - this.rowsTop) / ROW)];
    return row ? narrowest(row.filter((item) => item.start - slack <= at && item.end + slack >= at).flatMap((item) => item.spans)) : null;
  }
}

const STEPS_S = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

/** As `ticks`, of microseconds: above a second in steps of a clock. */
function timeTicks(from, to, count) {
  const step = STEPS_S.find((seconds) => seconds * 1e6 >= (to - from) / count);
  if (!step || to - from < count * 1e6) return ticks(from, to, count);
  const found = [];
  for (let at = Math.ceil(from / (step * 1e6)); at * step * 1e6 <= to; at++) found.push(at * step * 1e6);
  return found;
}

/** 95.5 s, 3:28, 1:02:03; as many decimals as marks so far apart need. */
function clock(us, step) {
  const decimals = step < 1e6 ? Math.ceil(-Math.log10(step / 1e6)) : 0;
  if (us < 60e6) return time(Number(us.toPrecision(9)));
  const [hours, minutes] = [Math.floor(us / 3600e6), Math.floor(us / 60e6) % 60];
  const seconds = ((us / 1e6) % 60).toFixed(decimals).padStart(decimals ? decimals + 3 : 2, "0");
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${seconds}` : `${minutes}:${seconds}`;
}
