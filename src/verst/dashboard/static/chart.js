// One chart over iterations: lines, dots and bands of several runs, with a crosshair and its numbers as a table.

import { h, svg, number } from "./dom.js";

const WIDTH = 560;
const HEIGHT = 208;
const LEFT = 54;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 22;
const MAX_TABLE_ROWS = 200;

/**
 * A series is {label, run: class of its colour, kind: "train" | "heldout" | "gold", points: [[x, y]], dots, smooth}, a
 * band {run, points: [[x, seven numbers]]}; x ascend.
 */
export class Chart {
  constructor(title, format = number) {
    this.title = title;
    this.format = format;
    this.svg = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.keys = h("ul", { class: "keys" });
    this.table = h("details", { class: "muted" }, h("summary", {}, "Numbers"));
    this.table.addEventListener("toggle", () => this.fillTable());
    this.plot = h("div", { class: "chart" }, this.svg, this.tip);
    this.element = h("section", { class: "card" }, h("h3", {}, title), this.plot, this.keys, this.table);
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.unpoint());
    this.resized = new ResizeObserver(() => this.redraw());
    this.resized.observe(this.plot);
    this.seen = new IntersectionObserver((entries) => this.see(entries[entries.length - 1].isIntersecting), { rootMargin: "300px" });
    this.seen.observe(this.plot);
  }

  close() {
    this.resized.disconnect();
    this.seen.disconnect();
  }

  /** key: the same one means the same data. What is not near the screen is drawn when it comes there. */
  show(key, series, bands) {
    if (key === this.key) return;
    this.key = key;
    this.series = series().filter((line) => line.points.length);
    this.bands = bands().filter((band) => band.points.length);
    this.drawKeys();
    this.redraw();
  }

  see(visible) {
    this.visible = visible;
    if (visible && this.stale) this.redraw();
  }

  redraw() {
    this.stale = !this.visible;
    if (this.visible && this.series) this.draw();
  }

  draw() {
    const { bands } = this;
    const width = Math.max(200, this.plot.clientWidth || WIDTH);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.x = scale(extent(this.series.flatMap((line) => ends(line.points))), LEFT, width - RIGHT);
    const values = this.series.flatMap((line) => line.points.map((point) => point[1]));
    for (const band of bands) for (const [, b] of band.points) values.push(b[0], b[6]);
    this.y = scale(padded(extent(values)), HEIGHT - BOTTOM, TOP);
    this.cross = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.svg.replaceChildren(
      ...this.axes(width),
      ...bands.flatMap((band) => this.band(band)),
      ...this.series.flatMap((line) => this.line(line)),
      this.cross,
    );
    if (this.table.open) this.fillTable();
  }

  axes(width) {
    const found = [];
    for (const value of ticks(this.y.from, this.y.to, 4)) {
      const y = this.y(value);
      found.push(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
      found.push(svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, this.format(value)));
    }
    for (const value of ticks(this.x.from, this.x.to, 6).filter(Number.isInteger)) {
      found.push(svg("text", { x: this.x(value), y: HEIGHT - 6, "text-anchor": "middle" }, String(value)));
    }
    return found;
  }

  band({ run, points }) {
    return [
      ["outer", 1, 5],
      ["inner", 2, 4],
    ].map(([kind, low, high]) => {
      const up = points.map(([x, b]) => `${this.x(x).toFixed(1)},${this.y(b[high]).toFixed(1)}`);
      const down = points.map(([x, b]) => `${this.x(x).toFixed(1)},${this.y(b[low]).toFixed(1)}`).reverse();
      return svg("polygon", { class: `${kind} ${run}`, points: [...up, ...down].join(" ") });
    });
  }

  line({ run, kind, points, dots, smooth }) {
    const path = (at) => at.map(([x, y], i) => `${i ? "L" : "M"}${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`).join("");
    const parts = [];
    if (smooth > 1 && points.length > smooth) {
      parts.push(svg("path", { class: `raw ${run}`, d: path(peaks(points)) }));
      parts.push(svg("path", { class: `line ${kind} ${run}`, d: path(peaks(movingMean(points, smooth))) }));
    } else parts.push(svg("path", { class: `line ${kind} ${run}`, d: path(peaks(points)) }));
    if ((dots && points.length <= 150) || points.length === 1) {
      for (const [x, y] of points) parts.push(svg("circle", { class: `dot ${run}`, cx: this.x(x), cy: this.y(y), r: 3 }));
    }
    return parts;
  }

  summary() {
    if (!this.series.length) return `${this.title}: nothing yet`;
    const lines = this.series.map((line) => {
      const last = line.points[line.points.length - 1];
      return `${line.label} from ${this.format(line.points[0][1])} to ${this.format(last[1])} at iteration ${last[0]}`;
    });
    return `${this.title}: ${lines.join("; ")}`;
  }

  drawKeys() {
    this.svg.setAttribute("aria-label", this.summary());
    this.keys.replaceChildren(
      ...this.series.map((line) => {
        const mark = svg("svg", { viewBox: "0 0 26 10", class: line.run, "aria-hidden": "true" });
        mark.append(svg("path", { class: `line ${line.kind}`, d: "M0 5H26" }));
        return h("li", {}, h("span", { class: "chart" }, mark), `${line.label} ${this.format(line.points.at(-1)[1])}`);
      }),
    );
  }

  fillTable() {
    if (!this.table.open) return;
    const all = [...new Set(this.series.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
    const shown = all.slice(-MAX_TABLE_ROWS);
    const byX = this.series.map((line) => new Map(line.points));
    const head = h("tr", {}, h("th", {}, "iteration"), this.series.map((line) => h("th", {}, line.label)));
    const rows = shown.reverse().map((x) => h("tr", {}, h("th", {}, x), byX.map((at) => h("td", {}, this.format(at.get(x))))));
    const table = h("table", { class: "num" }, h("thead", {}, head), h("tbody", {}, rows));
    this.table.replaceChildren(this.table.firstChild, h("div", { class: "scroll", tabindex: "0" }, table));
  }

  point(event) {
    if (!this.series?.length) return;
    const box = this.plot.getBoundingClientRect();
    const wanted = this.x.invert(event.clientX - box.left);
    const x = nearest(this.series.flatMap((line) => line.points.map((point) => point[0])), wanted);
    const rows = this.series.map((line) => [line, line.points.find((point) => point[0] === x)]).filter(([, at]) => at);
    this.tip.replaceChildren(
      h("b", {}, `iteration ${x}`),
      ...rows.map(([line, at]) => h("div", {}, h("span", { class: `swatch ${line.run}` }), ` ${line.label} ${this.format(at[1])}`)),
    );
    this.tip.hidden = false;
    const left = this.x(x);
    this.tip.style.left = left > box.width / 2 ? "auto" : `${left + 10}px`;
    this.tip.style.right = left > box.width / 2 ? `${box.width - left + 10}px` : "auto";
    this.tip.style.top = "8px";
    this.cross.setAttribute("x1", left);
    this.cross.setAttribute("x2", left);
    this.cross.setAttribute("visibility", "visible");
  }

  unpoint() {
    this.tip.hidden = true;
    this.cross?.setAttribute("visibility", "hidden");
  }
}

/** Mean of each point and up to `window` - 1 before it. */
export function movingMean(points, window) {
  let sum = 0;
  return points.map(([x, y], i) => {
    sum += y;
    if (i >= window) sum -= points[i - window][1];
    return [x, sum / Math.min(i + 1, window)];
  });
}

const MOST_POINTS = 1200;

/** Of a long line the least and the largest value of each stretch: it looks the same and no spike is lost. */
export function peaks(points) {
  if (points.length <= MOST_POINTS) return points;
  const kept = [];
  const stretch = Math.ceil((2 * points.length) / MOST_POINTS);
  for (let start = 0; start < points.length; start += stretch) {
    let [low, high] = [start, start];
    for (let i = start; i < Math.min(points.length, start + stretch); i++) {
      if (points[i][1] < points[low][1]) low = i;
      if (points[i][1] > points[high][1]) high = i;
    }
    kept.push(points[Math.min(low, high)]);
    if (low !== high) kept.push(points[Math.max(low, high)]);
  }
  return kept;
}

/** Round values between low and high, about `count`. */
export function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough) ?? 10 * power;
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

function scale([from, to], start, end) {
  const at = (value) => start + ((value - from) / (to - from)) * (end - start);
  at.invert = (pixel) => from + ((pixel - start) / (end - start)) * (to - from);
  at.from = from;
  at.to = to;
  return at;
}

function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  return [low, high];
}

function padded([low, high]) {
  const pad = (high - low) * 0.05;
  return [low >= 0 && low < pad * 4 ? 0 : low - pad, high + pad];
}

function ends(points) {
  return [points[0][0], points[points.length - 1][0]];
}

function nearest(values, wanted) {
  return values.reduce((best, value) => (Math.abs(value - wanted) < Math.abs(best - wanted) ? value : best), values[0]);
}
