// Who did what when: workers and microgroups of each run on one axis, from the whole run down to a microsecond.

import { h, framewise, time } from "./dom.js";
import { Spans, idle } from "./lanes.js";
import { COLOURS, Painter, colourOf } from "./paint.js";
import { colour } from "./store.js";

const SETTLE_MS = 250;
const REFETCH_MS = 10_000;
const LEAST_WINDOW_US = 1;

export class TimelineView {
  constructor(store) {
    this.store = store;
    this.panels = new Map();
    /** [from, to] in microseconds since each run's first span; null: the whole run, also while it grows. */
    this.window = null;
    this.layout = "packed";
    this.body = h("div");
    const button = (text, label, action) => h("button", { type: "button", "aria-label": label, onclick: action }, text);
    this.one = h("button", { type: "button", "aria-pressed": "false", onclick: () => this.toggleLayout() }, "A row for each microgroup in the window");
    this.element = h(
      "div",
      {},
      h("h2", {}, "Timeline"),
      h(
        "p",
        { class: "muted" },
        "Drag to move, Ctrl and wheel to zoom, wheel to scroll; or with the keyboard: arrows, + and −, 0 for the whole run, Page Up and Down.",
      ),
      h(
        "div",
        { class: "bar" },
        button("+", "Zoom in", () => this.zoom(0.5)),
        button("−", "Zoom out", () => this.zoom(2)),
        button("Whole run", "Whole run", () => this.fit()),
        button("Last iteration", "Last iteration", () => this.lastIteration()),
        this.one,
        h("span", { class: "muted num", role: "status", id: "window" }),
      ),
      h("ul", { class: "legend" }, COLOURS.map(([label, , name]) => h("li", {}, swatch(name), ` ${label}`)), h("li", {}, "hatched: idle")),
      this.body,
    );
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.redraw = () => this.drawAll();
    this.dark.addEventListener("change", this.redraw);
  }

  close() {
    this.dark.removeEventListener("change", this.redraw);
    for (const panel of this.panels.values()) panel.close();
  }

  update() {
    const runs = this.store.visible;
    const shown = runs.map((run) => run.number).join();
    for (const run of runs) {
      if (!this.panels.has(run.number)) this.panels.set(run.number, new Panel(this, run));
      this.panels.get(run.number).refresh();
    }
    if (shown !== this.shown) {
      this.shown = shown;
      this.body.replaceChildren(...runs.map((run) => this.panels.get(run.number).element));
    }
    this.drawAll();
  }

  get visible() {
    return this.store.visible.map((run) => this.panels.get(run.number)).filter(Boolean);
  }

  /** The window that is drawn. */
  get range() {
    if (this.window) return this.window;
    const wholes = this.visible.map((panel) => panel.overview?.whole).filter(Boolean);
    if (!wholes.length) return [0, 1e6];
    const [from, to] = [Math.min(...wholes.map((w) => w[0])), Math.max(...wholes.map((w) => w[1]))];
    return to > from ? [from, to] : [from, from + 1];
  }

  /** share: where in the window stays where it is, 0..1. */
  zoom(factor, share = 0.5) {
    const [from, to] = this.range;
    const size = Math.max(LEAST_WINDOW_US, (to - from) * factor);
    const at = from + (to - from) * share;
    this.setWindow([at - size * share, at - size * share + size]);
  }

  move(share) {
    const [from, to] = this.range;
    this.setWindow([from + (to - from) * share, to + (to - from) * share]);
  }

  fit() {
    this.setWindow(null);
  }

  lastIteration() {
    let last = null;
    for (const panel of this.visible) {
      const driver = panel.overview?.lanes().find((lane) => lane.kind === "driver");
      const found = driver?.spans.findLast((span) => span.name === "iteration");
      if (found && (!last || found.end > last.end)) last = found;
    }
    if (last) this.setWindow([last.start, last.end]);
  }

  setWindow(window) {
    const wholes = this.visible.map((panel) => panel.overview?.whole).filter(Boolean);
    if (window && wholes.length) {
      const whole = [Math.min(...wholes.map((w) => w[0])), Math.max(...wholes.map((w) => w[1]))];
      const size = Math.min(window[1] - window[0], (whole[1] - whole[0]) * 1.2 || 1);
      const middle = Math.min(whole[1], Math.max(whole[0], (window[0] + window[1]) / 2));
      window = [middle - size / 2, middle + size / 2];
    }
    this.window = window;
    this.drawAll();
    clearTimeout(this.settling);
    this.settling = setTimeout(() => this.visible.forEach((panel) => panel.settle()), SETTLE_MS);
  }

  toggleLayout() {
    this.layout = this.layout === "packed" ? "rows" : "packed";
    this.one.setAttribute("aria-pressed", String(this.layout === "rows"));
    for (const panel of this.panels.values()) panel.painter.scrollTo(0);
    this.drawAll();
  }

  drawAll() {
    const [from, to] = this.range;
    const text = document.getElementById("window");
    if (text) text.textContent = `from ${time(from)}, ${time(to - from)} wide`;
    for (const panel of this.visible) panel.draw();
  }
}

function swatch(name) {
  const mark = h("span", { class: "swatch" });
  mark.style.background = `var(${colourOf(name)})`;
  return mark;
}

/** One run. */
class Panel {
  constructor(view, run) {
    this.view = view;
    this.run = run;
    this.canvas = h("canvas", { tabindex: "0", role: "application", "aria-label": `Timeline of ${run.name}` });
    this.tip = h("div", { class: "tip", hidden: true });
    this.chosen = h("dl", { class: "facts num", "aria-live": "polite" });
    this.note = h("p", { class: "muted" });
    this.table = h("details", { class: "muted" }, h("summary", {}, "Lanes in numbers"));
    this.table.addEventListener("toggle", () => this.fillTable());
    this.element = h(
      "section",
      { class: colour(run) },
      h("h3", {}, h("span", { class: "swatch" }), ` ${run.name}`),
      h("div", { class: "timeline" }, this.canvas, this.tip),
      this.note,
      this.chosen,
      this.table,
    );
    this.painter = new Painter(this.canvas);
    this.draw = framewise(() => this.paint());
    this.resized = new ResizeObserver(() => this.draw());
    this.resized.observe(this.canvas);
    this.handle();
  }

  close() {
    this.resized.disconnect();
  }

  /** Fetch what there is now, or what was added to it. */
  async refresh() {
    const { run } = this;
    const void_ = this.version !== run.version;
    if (this.asking || (!void_ && this.overview && this.overview.total >= run.spans) || !run.spans) return;
    const more = !void_ && this.overview?.sampled === 1;
    if (!more && !void_ && performance.now() - this.fetchedMs < REFETCH_MS) return;
    this.asking = true;
    try {
      const answer = await this.view.store.source.spans(run.number, more ? { since: this.overview.total } : {});
      if (more && answer.sampled === 1) {
        const [from, to] = this.overview.whole;
        if (answer.columns.start.length) answer.whole = [Math.min(from, answer.whole[0]), Math.max(to, answer.whole[1])];
        else answer.whole = [from, to];
        this.overview.add(answer);
      } else this.overview = new Spans(answer);
      this.version = run.version;
      this.fetchedMs = performance.now();
    } finally {
      this.asking = false;
    }
    this.view.drawAll();
  }

  /** Where spans were merged, those of the window are fetched when it stands still. */
  async settle() {
    if (this.table.open) this.fillTable();
    if (!this.view.store.source.live || !this.overview || this.overview.sampled === 1 || !this.view.window) return;
    const [from, to] = this.view.range;
    const answer = await this.view.store.source.spans(this.run.number, { from: from - (to - from), to: to + (to - from) });
    this.detail = new Spans(answer);
    this.detail.covers = [from - (to - from), to + (to - from)];
    this.draw();
  }

  get spans() {
    const [from, to] = this.view.range;
    const inside = this.detail && this.view.window && from >= this.detail.covers[0] && to <= this.detail.covers[1];
    return inside ? this.detail : this.overview;
  }

  paint() {
    if (!this.overview) {
      this.note.textContent = this.run.spans ? "Loading." : "No spans yet.";
      return;
    }
    const spans = this.spans;
    const more = this.view.store.source.live ? "; zoom in for all" : "";
    const sampled = spans.sampled > 1 ? `; one of ${spans.sampled} microgroups is drawn${more}` : "";
    const text = `${spans.rows().length} microgroups, ${this.overview.total} spans${sampled}.`;
    if (this.note.textContent !== text) this.note.textContent = text;
    this.painter.paint(spans, this.view.range, this.view.layout);
  }

  fillTable() {
    if (!this.table.open || !this.overview) return;
    const [from, to] = this.view.range;
    const rows = this.spans.lanes().filter((lane) => lane.works).map((lane) => {
      const { busy, gaps } = idle(lane, from, to, 0);
      const longest = gaps.reduce((most, gap) => Math.max(most, gap[1] - gap[0]), 0);
      return [lane.name, `${(100 * busy).toFixed(1)} %`, time(longest)];
    });
    const head = h("tr", {}, ["Lane", "Busy in the window", "Longest idle"].map((text) => h("th", { scope: "col" }, text)));
    const body = rows.map(([name, ...rest]) => h("tr", {}, h("th", { scope: "row" }, name), rest.map((text) => h("td", {}, text))));
    this.table.replaceChildren(this.table.firstChild, h("table", { class: "num" }, h("thead", {}, head), h("tbody", {}, body)));
  }

  handle() {
    const { canvas, view, painter } = this;
    let drag = null;
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.offsetX, y: event.offsetY, range: view.range, scroll: painter.scroll, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!drag) return this.point(event);
      const [from, to] = drag.range;
      const by = ((drag.x - event.offsetX) / painter.plotWidth) * (to - from);
      drag.moved ||= Math.hypot(event.offsetX - drag.x, event.offsetY - drag.y) > 3;
      painter.scrollTo(drag.scroll + drag.y - event.offsetY);
      if (drag.moved) view.setWindow([from + by, to + by]);
    });
    canvas.addEventListener("pointerup", (event) => {
      if (drag && !drag.moved) this.choose(painter.hit(event.offsetX, event.offsetY));
      drag = null;
    });
    canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  wheel(event) {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.view.zoom(Math.exp(event.deltaY * 0.004), this.painter.share(event.offsetX));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.view.move((event.deltaX || event.deltaY) / this.painter.plotWidth);
    } else if (this.painter.scrollTo(this.painter.scroll + event.deltaY)) {
      event.preventDefault();
      this.draw();
    }
  }

  key(event) {
    const actions = {
      ArrowLeft: () => this.view.move(-0.1),
      ArrowRight: () => this.view.move(0.1),
      ArrowUp: () => this.scrollBy(-40),
      ArrowDown: () => this.scrollBy(40),
      PageUp: () => this.scrollBy(-400),
      PageDown: () => this.scrollBy(400),
      "+": () => this.view.zoom(0.5),
      "-": () => this.view.zoom(2),
      0: () => this.view.fit(),
    };
    if (!(event.key in actions) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    actions[event.key]();
  }

  scrollBy(pixels) {
    this.painter.scrollTo(this.painter.scroll + pixels);
    this.draw();
  }

  point(event) {
    const span = this.painter.hit(event.offsetX, event.offsetY);
    this.tip.hidden = !span;
    if (!span) return;
    this.tip.replaceChildren(h("b", {}, span.name), ` ${time(span.end - span.start)}${span.lane ? `, ${span.lane}` : ""}`);
    const right = event.offsetX > this.canvas.clientWidth / 2;
    this.tip.style.left = right ? "auto" : `${event.offsetX + 12}px`;
    this.tip.style.right = right ? `${this.canvas.clientWidth - event.offsetX + 12}px` : "auto";
    this.tip.style.top = `${event.offsetY + 12}px`;
  }

  choose(span) {
    const facts = span ? describe(span, this.spans) : [];
    this.chosen.replaceChildren(...facts.flatMap(([term, value]) => [h("dt", {}, term), h("dd", {}, String(value))]));
  }
}

function describe(span, spans) {
  const began = new Date((spans.origin + span.start / 1e6) * 1000);
  const facts = [
    ["span", span.count > 1 ? `${span.name}, ${span.count} of them merged` : span.name],
    ["lane", span.lane || "stage of a microgroup"],
    ["began", `${time(span.start)} after the first (${began.toLocaleString()})`],
    ["took", time(span.end - span.start)],
  ];
  for (const key of ["iteration", "rollout", "group", "index"]) if (span[key] > -2) facts.push([key, span[key]]);
  return [...facts, ...Object.entries(spans.said(span))];
}
