// Elements and numbers as text.

/** h("button", {class: "x", onclick: f}, "text", child): null and false children are left out. */
export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  set(element, attributes);
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  set(element, attributes);
  element.append(...children);
  return element;
}

function set(element, attributes) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
}

/** 4 significant digits, no needless zeros. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

export function signed(value) {
  return (value > 0 ? "+" : value < 0 ? "−" : "±") + number(Math.abs(value));
}

/** Microseconds in the unit that reads best. */
export function time(us) {
  const size = Math.abs(us);
  if (size < 1e3) return `${trim(us, 1)} µs`;
  if (size < 1e6) return `${trim(us / 1e3, 2)} ms`;
  if (size < 120e6) return `${trim(us / 1e6, 2)} s`;
  if (size < 7200e6) return `${trim(us / 60e6, 1)} min`;
  return `${trim(us / 3600e6, 2)} h`;
}

function trim(value, digits) {
  return String(Number(value.toFixed(digits)));
}

/** In powers of 1000: marks of an axis stay round. */
export function bytes(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const unit = Math.min(4, Math.max(0, Math.floor(Math.log10(Math.abs(value) || 1) / 3)));
  return `${Number((value / 1000 ** unit).toPrecision(4))} ${["B", "kB", "MB", "GB", "TB"][unit]}`;
}

/** Calls once a frame, however often it is asked. */
export function framewise(callback) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      callback();
    });
  };
}
