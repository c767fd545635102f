// All metrics as charts: each has a place, and what has none stands at the end, so that nothing is hidden.

import { bytes, h, number, signed } from "./dom.js";
import { Chart } from "./chart.js";
import { colour, metricNames } from "./store.js";

const TITLES = {
  "policy/ratio_max_deviation": "Ratio: largest |ratio − 1| before the update",
  "policy/log_prob_max_difference": "Log-prob: largest |trainer − engine| (nats)",
  "policy/clip_fraction": "Clip fraction",
  "policy/kl": "KL to the reference (nats)",
  "train/loss": "Loss",
  "train/grad_norm": "Gradient norm",
  "train/lr": "Learning rate",
};

/** [heading, view, which metrics]; the first that fits takes a metric. */
const SECTIONS = [
  ["Agreement of engine and trainer", "learning", /^policy\/(ratio|log_prob)/],
  ["Policy", "learning", /^policy\//],
  ["Training", "learning", /^(train|eval|data)\//],
  ["Rollout", "learning", /^rollout\//],
  ["Utilisation", "system", /utili[sz]ation|busy|^perf\/.*occupancy/],
  ["GPU and memory", "system", /gpu|memory|cuda/i],
  ["Waiting", "system", /^perf\/.*(wait|queue|lag)/],
  ["Seconds of an iteration", "system", /^perf\/[^/]*_s$/],
  ["Everything else of the machines", "system", /^(perf|sync)\//],
  ["Everything else", "learning", /./],
];

export class CurvesView {
  constructor(store, kind) {
    this.store = store;
    this.kind = kind;
    this.charts = new Map();
    this.smooth = 7;
    this.filter = "";
    this.tiles = h("div");
    this.body = h("div");
    this.element = h(
      "div",
      {},
      this.tiles,
      h(
        "div",
        { class: "bar" },
        h("label", {}, "Moving mean of ", this.smoothing()),
        h("label", {}, "Find a metric ", h("input", { type: "search", oninput: (e) => this.find(e.target.value) })),
      ),
      this.body,
    );
  }

  smoothing() {
    const options = [1, 7, 25, 100].map((n) => h("option", { value: n, selected: n === this.smooth }, `${n} iterations`));
    return h("select", { onchange: (event) => this.smoothBy(Number(event.target.value)) }, options);
  }

  smoothBy(window) {
    this.smooth = window;
    this.update();
  }

  find(text) {
    this.filter = text.toLowerCase();
    this.update();
  }

  close() {
    for (const chart of this.charts.values()) chart.close();
  }

  update() {
    const runs = this.store.visible;
    const names = metricNames(runs);
    if (this.kind === "learning") this.tiles.replaceChildren(...runs.map(summary));
    const places = this.kind === "learning" ? [["Rewards", rewardCharts(names)]] : [];
    const rest = names.filter((name) => !name.startsWith("reward/") || /\/num_/.test(name));
    const taken = new Map(SECTIONS.map((section) => [section, []]));
    for (const name of rest) {
      if (name.startsWith("alarm/") || name.startsWith("watch/")) continue;
      taken.get(SECTIONS.find(([, , fits]) => fits.test(name))).push(name);
    }
    for (const [[heading, view], found] of taken) {
      if (view === this.kind) places.push([heading, found.map((name) => ({ title: name, lines: [["train", name]] }))]);
    }
    this.draw(places, runs);
  }

  draw(places, runs) {
    const used = new Set();
    const sections = [];
    for (const [heading, specs] of places) {
      const shown = specs.filter((spec) => spec.title.toLowerCase().includes(this.filter));
      if (!shown.length) continue;
      const charts = shown.map((spec) => {
        used.add(spec.title);
        if (!this.charts.has(spec.title)) {
          const format = spec.title.endsWith("bytes") ? bytes : number;
          this.charts.set(spec.title, new Chart(TITLES[spec.title] ?? spec.title, format));
        }
        return [this.charts.get(spec.title), spec];
      });
      sections.push([heading, charts]);
    }
    const layout = JSON.stringify(sections.map(([heading, charts]) => [heading, charts.map(([, spec]) => spec.title)]));
    if (layout !== this.layout) {
      this.layout = layout;
      this.body.replaceChildren(
        ...sections.flatMap(([heading, charts]) => [
          h("h2", {}, heading),
          h("div", { class: "charts" }, charts.map(([chart]) => chart.element)),
        ]),
      );
      if (!sections.length) this.body.append(h("p", { class: "muted" }, "No metrics yet."));
    }
    for (const [title, chart] of this.charts) {
      if (!used.has(title)) {
        chart.close();
        this.charts.delete(title);
      }
    }
    for (const [, charts] of sections) for (const [chart, spec] of charts) this.fill(chart, spec, runs);
  }

  fill(chart, spec, runs) {
    const state = runs.map((run) => [run.number, run.version, run.rows.length, run.told]);
    const lines = () =>
      runs.flatMap((run) =>
        spec.lines.map(([kind, metric, label]) => ({
          label: [runs.length > 1 ? run.name : null, label].filter(Boolean).join(", ") || "now",
          run: colour(run),
          kind,
          points: run.series(metric),
          dots: kind !== "train",
          smooth: kind === "train" ? this.smooth : 1,
        })),
      );
    const bands = () => (spec.band ? runs.map((run) => ({ run: colour(run), points: run.band(spec.band) })) : []);
    chart.show(JSON.stringify([state, spec, this.smooth]), lines, bands);
  }
}

/** One chart for the sum and one for each reward, with training, held-out and gold readings in it. */
export function rewardCharts(names) {
  const has = new Set(names);
  const chart = (title, lines, band) => ({ title, band, lines: lines.filter(([, metric]) => has.has(metric)) });
  const found = [
    chart(
      "Reward (bands: group means)",
      [
        ["train", "reward/train_mean", "training"],
        ["heldout", "reward/heldout", "held-out"],
        ["heldout", "reward/heldout_saved", "held-out, as saved"],
      ],
      "total",
    ),
  ];
  const single = new Set();
  for (const name of names) {
    const match = /^reward\/(?:heldout\/(.+)|gold(?:_train)?\/(.+)|(.+)\/mean)$/.exec(name);
    if (match) single.add(match[1] ?? match[2] ?? match[3]);
  }
  for (const name of [...single].sort()) {
    const lines = [
      ["train", `reward/${name}/mean`, "training"],
      ["heldout", `reward/heldout/${name}`, "held-out"],
      ["gold", `reward/gold/${name}`, "gold, held-out"],
      ["gold", `reward/gold_train/${name}`, "gold, training"],
    ];
    found.push(chart(`Reward ${name}`, lines, name));
  }
  if (has.has("reward/train_std")) found.push(chart("Reward: spread of all samples", [["train", "reward/train_std"]]));
  return found.filter((spec) => spec.lines.length);
}

function summary(run) {
  const heldout = run.series("reward/heldout");
  const change = heldout.length > 1 ? ` (${signed(heldout.at(-1)[1] - heldout[0][1])})` : "";
  const tiles = [
    ["iteration", `${number(run.iteration)}${run.total ? ` of ${run.total}` : ""}`],
    ["held-out reward", heldout.length ? number(heldout.at(-1)[1]) + change : "–"],
    ["training reward", number(run.last("reward/train_mean"))],
    ["|ratio − 1|", number(run.last("policy/ratio_max_deviation"))],
    ["clip fraction", number(run.last("policy/clip_fraction"))],
    ["s an iteration", number(run.last("perf/iteration_s"))],
    ["samples / s", number(run.last("perf/samples_per_s"))],
    ["alarms", String(run.alarms.length)],
  ];
  return h(
    "section",
    { class: colour(run), "aria-label": `${run.name}: now` },
    h("h2", {}, run.name),
    h("dl", { class: "tiles" }, tiles.map(([term, value]) => h("div", { class: "tile" }, h("dt", {}, term), h("dd", {}, value)))),
  );
}
