// One sample in a dialog: zoom, clip and sound, what is known of it, and the same sample at other iterations.

import { h, number } from "./dom.js";

/** Narrower pictures than this are shown with hard pixels. */
const TINY = 128;
const ZOOMS = [1, 2, 4, 8, 16];
const dialog = document.getElementById("viewer");

/** rows: samples of one iteration; at: which; history(n): [{step, row}] of the n-th at every iteration. */
export function openViewer({ title, rows, at, step, history = null }) {
  const state = { title, rows, at, step, history, zoom: fitting(rows[at]) };
  draw(state);
  if (!dialog.open) dialog.showModal();
  dialog.onkeydown = (event) => {
    if (/^(INPUT|VIDEO|AUDIO)$/.test(event.target.tagName)) return;
    if (event.key === "ArrowRight") turn(state, 1);
    if (event.key === "ArrowLeft") turn(state, -1);
    if (event.key === "+") zoomBy(state, 1);
    if (event.key === "-") zoomBy(state, -1);
  };
}

function turn(state, by) {
  state.at = (state.at + by + state.rows.length) % state.rows.length;
  state.step = state.home ?? state.step;
  state.row = undefined;
  draw(state);
}

function zoomBy(state, by) {
  const place = ZOOMS.findIndex((zoom) => zoom >= state.zoom);
  state.zoom = ZOOMS[Math.max(0, Math.min(ZOOMS.length - 1, (place < 0 ? 0 : place) + by))];
  draw(state);
}

/** Small pictures are enlarged by a whole factor, larger ones fit the dialog. */
function fitting(row) {
  return ZOOMS.findLast((zoom) => zoom * row.width <= 640) ?? Math.min(1, 900 / row.width);
}

function draw(state) {
  const row = state.row ?? state.rows[state.at];
  const button = (label, text, action) => h("button", { type: "button", "aria-label": label, onclick: action }, text);
  const strip = h("div", { class: "strip", "aria-label": "The same sample at other iterations", role: "group" });
  dialog.replaceChildren(
    h(
      "div",
      { class: "bar" },
      h("h2", {}, `${state.title}, iteration ${state.step}`),
      button("Previous sample", "←", () => turn(state, -1)),
      button("Next sample", "→", () => turn(state, 1)),
      button("Zoom out", "−", () => zoomBy(state, -1)),
      h("span", { class: "num", role: "status" }, `${number(state.zoom)}×`),
      button("Zoom in", "+", () => zoomBy(state, 1)),
      button("Close", "Close", () => dialog.close()),
    ),
    h("div", { class: "stage", tabindex: "0", role: "group", "aria-label": "Sample; scrolls where it is larger" }, media(row, state.zoom)),
    row.sound ? h("audio", { controls: true, src: row.clip, "aria-label": `Sound of: ${row.prompt}` }) : "",
    facts(row),
    strip,
  );
  if (state.history) fillStrip(state, strip);
}

/** The class of a sample's picture. */
export function crisp(row) {
  return row.width < TINY ? "tiny" : null;
}

function media(row, zoom) {
  const size = { width: Math.round(row.width * zoom), height: Math.round(row.height * zoom) };
  if (!row.clip) return h("img", { src: row.picture, alt: row.prompt, class: crisp(row), ...size });
  const video = h("video", { controls: true, loop: true, playsinline: true, poster: row.picture, ...size });
  video.setAttribute("aria-label", row.prompt);
  video.muted = !row.sound;
  video.src = row.clip;
  return video;
}

function facts(row) {
  const shown = [
    ["prompt", row.prompt],
    ["reward", row.reward === null ? "masked" : number(row.reward)],
    ...Object.entries(row.rewards).map(([name, value]) => [name, value === null ? "failed" : number(value)]),
    ["seed", String(row.seed)],
    ["group", row.group],
    ["index in the group", row.index],
    ["rank", row.rank],
    ["size", `${row.width} × ${row.height}${row.clip ? `, ${row.frames} frames at ${number(row.fps)} a second` : ""}`],
  ];
  const known = shown.filter(([, value]) => value !== undefined && value !== null);
  return h("dl", { class: "facts num" }, known.map(([term, value]) => [h("dt", {}, term), h("dd", {}, value)]));
}

async function fillStrip(state, strip) {
  const entries = await state.history(state.at);
  state.home ??= state.step;
  strip.replaceChildren(
    ...entries.map(({ step, row }) =>
      h(
        "button",
        { type: "button", "aria-pressed": String(step === state.step), onclick: () => show(state, step, row) },
        h("img", { src: row.picture, alt: `iteration ${step}`, loading: "lazy", class: crisp(row) }),
        h("span", {}, `${step}: ${row.reward === null ? "masked" : number(row.reward)}`),
      ),
    ),
  );
}

function show(state, step, row) {
  state.step = step;
  state.row = row;
  draw(state);
}
