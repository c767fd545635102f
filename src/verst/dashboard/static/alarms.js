// What the watch has said, newest first.

import { h } from "./dom.js";
import { colour } from "./store.js";

export class AlarmsView {
  constructor(store) {
    this.store = store;
    this.element = h("div");
  }

  update() {
    const rows = this.store.visible.flatMap((run) => run.alarms.map((alarm) => [run, alarm]));
    rows.sort((a, b) => b[1].time_s - a[1].time_s);
    const standing = this.store.visible.flatMap((run) => standingAlarms(run).map((name) => `${run.name}: ${name}`));
    const now = standing.length ? `Standing now: ${standing.join(", ")}.` : "No alarm stands at the last iteration.";
    this.element.replaceChildren(
      h("h2", {}, "Alarms"),
      h("p", { class: standing.length ? "warn" : "muted" }, now),
      rows.length ? table(rows) : h("p", { class: "muted" }, "None was raised in the runs that are shown."),
    );
  }
}

function standingAlarms(run) {
  const last = run.rows.at(-1) ?? {};
  return Object.keys(last)
    .filter((key) => key.startsWith("alarm/"))
    .map((key) => key.slice(6));
}

function table(rows) {
  const head = ["Run", "Iteration", "Time", "Alarm", "Action", "What is wrong"].map((text) => h("th", { scope: "col" }, text));
  const body = rows.map(([run, alarm]) =>
    h(
      "tr",
      { class: colour(run) },
      h("td", {}, h("span", { class: "swatch" }), ` ${run.name}`),
      h("td", { class: "num" }, alarm.iteration),
      h("td", { class: "num" }, new Date(alarm.time_s * 1000).toLocaleString()),
      h("td", {}, alarm.type),
      h("td", {}, alarm.action),
      h("td", {}, alarm.text),
    ),
  );
  return h("div", { class: "scroll", tabindex: "0" }, h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
}
