// The page: header, views, and what makes them draw again.

import { h, framewise } from "./dom.js";
import { openSource } from "./source.js";
import { Store, colour } from "./store.js";
import { CurvesView } from "./curves.js";
import { HeldoutView, ExtremesView } from "./samples.js";
import { TimelineView } from "./timeline.js";
import { AlarmsView } from "./alarms.js";
import { RecipeView } from "./recipe.js";

const VIEWS = {
  curves: ["Curves", (store) => new CurvesView(store, "learning")],
  heldout: ["Held-out samples", (store) => new HeldoutView(store)],
  extremes: ["Best and worst", (store) => new ExtremesView(store)],
  timeline: ["Timeline", (store) => new TimelineView(store)],
  system: ["Machines", (store) => new CurvesView(store, "system")],
  alarms: ["Alarms", (store) => new AlarmsView(store)],
  recipe: ["Recipe", (store) => new RecipeView(store)],
};

const store = new Store();
const place = document.getElementById("view");
let view = null;

function open() {
  const name = location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "curves";
  view?.close?.();
  view = VIEWS[name][1](store);
  place.replaceChildren(view.element);
  document.title = `${VIEWS[name][0]} – verst`;
  for (const link of document.querySelectorAll("#views a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  view.update();
}

function drawHeader() {
  document.getElementById("connection").textContent = store.connection;
  const legend = h("legend", {}, "Runs");
  const chips = store.runs.map((run) =>
    h(
      "label",
      { class: `chip ${colour(run)}` },
      h("input", {
        type: "checkbox",
        checked: store.shown.has(run.number),
        onchange: (event) => store.show(run.number, event.target.checked),
      }),
      h("span", { class: "swatch" }),
      h("span", {}, run.name),
      h("span", { class: "muted" }, progress(run)),
    ),
  );
  const fieldset = document.getElementById("runs");
  const focused = [...fieldset.querySelectorAll("input")].indexOf(document.activeElement);
  fieldset.replaceChildren(legend, ...chips);
  fieldset.querySelectorAll("input")[focused]?.focus();
}

function progress(run) {
  if (run.iteration === null) return "no metrics yet";
  const alarms = run.alarms.length ? `, ${run.alarms.length} alarm${run.alarms.length > 1 ? "s" : ""}` : "";
  const damaged = run.facts.damaged ? `, ${run.facts.damaged} damaged lines` : "";
  return `${run.iteration}${run.total ? ` of ${run.total}` : ""}${run.finished ? ", finished" : ""}${alarms}${damaged}`;
}

const THEMES = ["system", "light", "dark"];

/** A page that is opened from a disk may not be allowed to remember. */
function remembered() {
  try {
    return localStorage.getItem("verst-theme");
  } catch {
    return null;
  }
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = `Theme: ${theme}`;
  try {
    localStorage.setItem("verst-theme", theme);
  } catch {
    return;
  }
}

document.getElementById("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme;
  setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
  view?.update();
});
document
  .getElementById("views")
  .append(...Object.entries(VIEWS).map(([name, [label]]) => h("li", {}, h("a", { href: `#${name}` }, label))));
setTheme(remembered() ?? "system");
const draw = framewise(() => {
  drawHeader();
  view.update();
});
for (const what of ["runs", "run", "connection"]) store.addEventListener(what, draw);
window.addEventListener("hashchange", open);
open();
store.listenTo(openSource());
