// The recipes of the runs that are shown, key by key, where they differ, and what made the runs.

import { h } from "./dom.js";
import { colour } from "./store.js";

export class RecipeView {
  constructor(store) {
    this.store = store;
    this.onlyDifferences = false;
    this.filter = "";
    this.body = h("div");
    this.count = h("span", { class: "muted", role: "status" });
    const only = h("input", { type: "checkbox", onchange: (event) => this.restrict(event.target.checked) });
    const find = h("input", { type: "search", oninput: (event) => this.find(event.target.value) });
    this.element = h(
      "div",
      {},
      h("div", { class: "bar" }, h("label", {}, only, " Only differences"), h("label", {}, "Find a key ", find), this.count),
      this.body,
    );
  }

  restrict(on) {
    this.onlyDifferences = on;
    this.update();
  }

  find(text) {
    this.filter = text.toLowerCase();
    this.update();
  }

  update() {
    const runs = this.store.visible;
    const signature = JSON.stringify([runs.map((run) => [run.number, run.facts]), this.onlyDifferences, this.filter]);
    if (signature === this.signature) return;
    this.signature = signature;
    const rows = compare(runs.map((run) => run.facts.recipe));
    const differing = rows.filter((row) => row.differs).length;
    this.count.textContent = runs.length > 1 ? `${differing} of ${rows.length} keys differ` : `${rows.length} keys`;
    const shown = rows.filter(
      (row) => (row.differs || !this.onlyDifferences) && `${row.key} ${row.values.join(" ")}`.toLowerCase().includes(this.filter),
    );
    const errors = runs.map((run) => run.facts.recipe_error).filter(Boolean);
    this.body.replaceChildren(
      ...errors.map((text) => h("p", { class: "warn" }, text)),
      table("Recipe", runs, shown),
      table("What made the run", runs, compare(runs.map((run) => origin(run.facts)))),
    );
  }
}

/** [{key, values: texts, differs}] of flat tables, by key; a key that one does not have differs. */
export function compare(tables) {
  const keys = [...new Set(tables.flatMap((table) => Object.keys(table)))].sort();
  return keys.map((key) => {
    const values = tables.map((table) => (key in table ? text(table[key]) : "unset"));
    return { key, values, differs: new Set(values).size > 1 };
  });
}

function text(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

function origin(facts) {
  const found = { folder: facts.folder };
  const run = facts.run ?? {};
  for (const [name, version] of Object.entries(run.packages ?? {})) found[`version of ${name}`] = version ?? "not installed";
  for (const [name, value] of Object.entries(run.machine ?? {})) found[`machine: ${name}`] = value;
  if (run.python) found["version of Python"] = run.python;
  if (run.git) found["git commit"] = run.git;
  if (run.command) found.command = run.command.join(" ");
  if (run.started) found.started = new Date(run.started * 1000).toLocaleString();
  if ((run.resumed ?? []).length > 1) found["times resumed"] = run.resumed.length - 1;
  return found;
}

function table(heading, runs, rows) {
  const head = h(
    "tr",
    {},
    h("th", { scope: "col" }, "Key"),
    runs.map((run) => h("th", { scope: "col", class: colour(run) }, h("span", { class: "swatch" }), ` ${run.name}`)),
  );
  const body = rows.map((row) =>
    h("tr", { class: row.differs ? "differs" : null }, h("th", { scope: "row" }, row.key), row.values.map((v) => h("td", {}, v))),
  );
  return h(
    "section",
    {},
    h("h2", {}, heading),
    h("div", { class: "scroll", tabindex: "0" }, h("table", {}, h("thead", {}, head), h("tbody", {}, body))),
  );
}
