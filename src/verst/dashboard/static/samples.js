// Pictures, clips and sound: the fixed held-out samples over time, and the best and worst of each group.

import { h, number, signed } from "./dom.js";
import { colour } from "./store.js";
import { crisp, openViewer } from "./viewer.js";

const PLAY_MS = 900;

/** A slider over the iterations of which a kind of samples is there, and a body for each run that is shown. */
class StepView {
  constructor(store, kind, heading, explanation) {
    this.store = store;
    this.kind = kind;
    this.follow = true;
    this.steps = [];
    this.cache = new Map();
    this.slider = h("input", { type: "range", min: 0, value: 0, "aria-label": "Iteration", oninput: () => this.slide() });
    this.label = h("output", { class: "num" });
    this.play = h("button", { type: "button", "aria-pressed": "false", onclick: () => this.togglePlay() }, "Play");
    this.body = h("div", { class: "sides" });
    this.element = h(
      "div",
      {},
      h("h2", {}, heading),
      h("p", { class: "muted" }, explanation),
      h("div", { class: "bar" }, this.play, this.slider, this.label),
      this.body,
    );
  }

  close() {
    clearInterval(this.timer);
  }

  get iteration() {
    return this.steps[Number(this.slider.value)] ?? null;
  }

  slide() {
    this.follow = Number(this.slider.value) === this.steps.length - 1;
    this.update();
  }

  togglePlay() {
    const playing = this.timer !== undefined;
    clearInterval(this.timer);
    this.timer = playing ? undefined : setInterval(() => this.advance(), PLAY_MS);
    this.play.setAttribute("aria-pressed", String(!playing));
    this.play.textContent = playing ? "Play" : "Stop";
  }

  advance() {
    this.slider.value = (Number(this.slider.value) + 1) % Math.max(1, this.steps.length);
    this.slide();
  }

  stepsOf(run) {
    return run.samples[this.kind] ?? [];
  }

  update() {
    const runs = this.store.visible;
    const steps = [...new Set(runs.flatMap((run) => this.stepsOf(run)))].sort((a, b) => a - b);
    if (JSON.stringify(steps) !== JSON.stringify(this.steps)) {
      const before = this.iteration;
      this.steps = steps;
      this.slider.max = Math.max(0, steps.length - 1);
      const kept = this.follow ? steps.length - 1 : steps.findIndex((step) => step >= before);
      this.slider.value = kept < 0 ? steps.length - 1 : kept;
    }
    const iteration = this.iteration;
    this.slider.disabled = this.play.disabled = steps.length < 2;
    this.slider.setAttribute("aria-valuetext", `iteration ${iteration}`);
    this.label.textContent = iteration === null ? "" : `iteration ${iteration}`;
    const key = JSON.stringify([iteration, runs.map((run) => [run.number, run.version, this.stepsOf(run)])]);
    if (key === this.drawn) return;
    this.drawn = key;
    this.draw(runs, iteration, key);
  }

  async draw(runs, iteration, key) {
    const sides = await Promise.all(
      runs.map(async (run) => {
        const step = this.stepsOf(run).findLast((at) => at <= iteration);
        const nothing = h("p", { class: "muted" }, "Nothing of this kind, up to this iteration.");
        const content = step === undefined ? await this.instead(run, iteration, nothing) : await this.content(run, step);
        const at = step === undefined || step === iteration ? "" : ` (iteration ${step})`;
        const title = h("h3", { class: colour(run) }, h("span", { class: "swatch" }), run.name + at);
        return h("section", { class: "side" }, title, content);
      }),
    );
    if (this.drawn === key) this.body.replaceChildren(...sides);
  }

  async instead(run, iteration, nothing) {
    return nothing;
  }

  /** What is known of the samples of one iteration. */
  rows(run, step) {
    const key = `${run.number} ${run.version} ${step}`;
    if (!this.cache.has(key)) this.cache.set(key, this.store.source.samples(run.number, this.kind, step));
    return this.cache.get(key);
  }

  /** The n-th sample at every iteration there is, for the viewer. */
  async history(run, n) {
    const steps = this.stepsOf(run);
    const rows = await Promise.all(steps.map((step) => this.rows(run, step)));
    return steps.map((step, i) => ({ step, row: rows[i][n] })).filter((entry) => entry.row);
  }
}

export class HeldoutView extends StepView {
  constructor(store) {
    const explanation = "The same prompts from the same noise at every evaluation, with each reward and its change since the first one.";
    super(store, "heldout", "Held-out samples", explanation);
  }

  stepsOf(run) {
    const own = run.samples.heldout;
    return own.length ? own : run.samples.sheets;
  }

  async content(run, step) {
    if (!run.samples.heldout.length) {
      const alt = `Held-out samples of ${run.name} at iteration ${step}, in one picture`;
      return h("img", { class: "sheet", src: this.store.source.sheet(run.number, step), alt });
    }
    const [rows, first] = await Promise.all([this.rows(run, step), this.rows(run, run.samples.heldout[0])]);
    const open = (n) => openViewer({ title: run.name, rows, at: n, step, history: (i) => this.history(run, i) });
    return h(
      "ul",
      { class: "shots" },
      rows.map((row, n) => h("li", {}, shot(row, () => open(n), change(row, first[n])))),
    );
  }
}

function change(row, first) {
  return row.reward === null || !first || first.reward === null ? "" : signed(row.reward - first.reward);
}

export class ExtremesView extends StepView {
  constructor(store) {
    const explanation =
      "Of each group of a rollout (one prompt, several samples) the sample with the highest and the one with the lowest reward.";
    super(store, "rollout", "Best and worst of each group", explanation);
  }

  async content(run, step) {
    const [rows, groups] = await Promise.all([this.rows(run, step), this.store.source.groups(run.number, step)]);
    const numbers = [...new Set(rows.map((row) => row.group))];
    const open = (n) => openViewer({ title: run.name, rows, at: n, step });
    const cards = numbers.map((number_) => {
      const group = groups.find((row) => row.group === number_);
      const members = rows.map((row, n) => [row, n]).filter(([row]) => row.group === number_);
      return h(
        "li",
        { class: "card" },
        h("h3", {}, members[0][0].prompt || "(no prompt)"),
        group && h("p", { class: "muted num" }, spread(group)),
        h("div", { class: "pair" }, members.map(([row, n]) => shot(row, () => open(n), row.rank))),
      );
    });
    return h("ul", { class: "groups" }, cards);
  }
}

function spread(group) {
  const dropped = group.dropped_by ? `; dropped by ${group.dropped_by}` : "";
  return `${group.num} samples: mean ${number(group.mean)}, ${number(group.min)} to ${number(group.max)}${dropped}`;
}

function shot(row, open, note) {
  const kind = row.clip ? ` · ${row.frames} frames${row.sound ? ", sound" : ""}` : "";
  return h(
    "button",
    { type: "button", class: "shot", onclick: open },
    h("img", { src: row.picture, alt: row.prompt, class: crisp(row), width: row.width, height: row.height, loading: "lazy" }),
    h(
      "span",
      { class: "cap" },
      h("b", {}, row.reward === null ? "masked" : number(row.reward)),
      h("span", { class: "muted" }, ` ${note}${kind}`),
      h("span", { class: "prompt" }, row.prompt),
    ),
  );
}
