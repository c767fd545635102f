// From spans in columns to what a canvas draws: lanes sorted by time, rows of microgroups, busy shares, idle gaps.

const NONE = -2;
const KINDS = ["driver", "trainer", "engine", "parser", "reward", "rollout", "filter"];
/** What a lane has and does no work in. */
const WAITS = /wait|drain|^iteration$/;
/** The whole stages of a microgroup; what else it has lies inside of them. */
export const STAGES = new Set(["generate", "deserialize", "reward"]);

/** Every span there is: grows with `add`, is put in order by `lanes`. */
export class Spans {
  constructor(answer) {
    this.lanesOf = new Map();
    this.stages = new Map();
    this.extras = {};
    this.add(answer);
  }

  /** answer: of /api/runs/{n}/spans. */
  add(answer) {
    this.origin = answer.origin_s;
    this.total = answer.total;
    this.sampled = answer.sampled;
    this.names = answer.names;
    this.whole = answer.whole;
    Object.assign(this.extras, answer.extras);
    const c = answer.columns;
    const waits = answer.names.map((name) => WAITS.test(name));
    for (let i = 0; i < c.start.length; i++) {
      const span = {
        start: c.start[i],
        end: c.start[i] + c.us[i],
        name: answer.names[c.name[i]],
        lane: answer.lanes[c.lane[i]],
        rollout: c.rollout[i],
        group: c.group[i],
        index: c.index[i],
        iteration: c.iteration[i],
        extra: c.extra[i],
        count: c.count[i],
        busy: c.busy[i],
        waits: waits[c.name[i]],
      };
      if (span.lane === "") this.addStage(span);
      else if (this.lanesOf.has(span.lane)) this.lanesOf.get(span.lane).push(span);
      else this.lanesOf.set(span.lane, [span]);
    }
    this.order = null;
    this.microgroups = null;
  }

  addStage(span) {
    const key = `${span.rollout} ${span.group} ${span.index}`;
    if (this.stages.has(key)) this.stages.get(key).push(span);
    else this.stages.set(key, [span]);
  }

  /** [{name, kind, spans by start, ends: the latest end so far}], the driver first. */
  lanes() {
    this.order ??= [...this.lanesOf]
      .map(([name, spans]) => {
        spans.sort((a, b) => a.start - b.start || b.end - a.end);
        let latest = -Infinity;
        const ends = spans.map((span) => (latest = Math.max(latest, span.end)));
        // What is of nobody, such as a whole rollout, is never idle.
        return { name, kind: kindOf(name), works: name.includes(":"), spans, ends };
      })
      .sort((a, b) => rank(a) - rank(b) || a.name.localeCompare(b.name, undefined, { numeric: true }));
    return this.order;
  }

  /** Microgroups, {start, end, spans}, as they began; within each the whole stages before what is inside of them. */
  rows() {
    this.microgroups ??= [...this.stages.values()].flatMap(made).sort((a, b) => a.start - b.start);
    return this.microgroups;
  }

  said(span) {
    return span.extra === NONE ? {} : (this.extras[span.extra] ?? {});
  }
}

/** One place can be filled more than once: by each evaluation, and by a resumed run. Every time begins with `generate`. */
function made(spans) {
  spans.sort((a, b) => a.start - b.start || b.end - a.end);
  const found = [];
  for (const span of spans) {
    const last = found[found.length - 1];
    if (!last || (span.name === "generate" && span.start >= last.end)) {
      found.push({ start: span.start, end: span.end, spans: [span] });
    } else {
      last.spans.push(span);
      last.end = Math.max(last.end, span.end);
    }
  }
  for (const { spans } of found) spans.sort((a, b) => STAGES.has(b.name) - STAGES.has(a.name) || a.start - b.start);
  return found;
}

function kindOf(name) {
  return name.includes(":") ? name.slice(0, name.lastIndexOf(":")) : name;
}

function rank(lane) {
  const place = KINDS.findIndex((kind) => lane.kind === kind || lane.kind.startsWith(`${kind}/`));
  return place < 0 ? KINDS.length : place;
}

/** Each microgroup in the first row that is free when it begins: [[microgroup...]...]. */
export function packed(microgroups) {
  const rows = [];
  const free = [];
  for (const item of microgroups) {
    let at = free.findIndex((end) => end <= item.start);
    if (at < 0) {
      at = rows.length;
      rows.push([]);
    }
    rows[at].push(item);
    free[at] = item.end;
  }
  return rows;
}

/** Index of the first of `sorted` that is not less than `value`. */
export function lowerBound(sorted, value, of = (item) => item) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (of(sorted[middle]) < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The spans of a lane that touch [from, to], as [first, end) of its array. */
export function touching(lane, from, to) {
  const first = lowerBound(lane.ends, from);
  const end = lowerBound(lane.spans, to, (span) => span.start);
  return [first, Math.max(first, end)];
}

/** {busy: share of [from, to], gaps: [[from, to]] longer than `least`}: where nothing at all is done on a lane. */
export function idle(lane, from, to, least) {
  const gaps = [];
  const [first, end] = touching(lane, from, to);
  let at = from;
  let quiet = 0;
  let merged = false;
  let busy = 0;
  for (let i = first; i < end; i++) {
    const span = lane.spans[i];
    if (span.waits) continue;
    merged ||= span.count > 1;
    const inside = Math.min(to, span.end) - Math.max(from, span.start);
    if (inside > 0) busy += span.busy * (inside / (span.end - span.start));
    if (span.start > at) {
      quiet += span.start - at;
      if (span.start - at > least) gaps.push([at, span.start]);
    }
    at = Math.max(at, span.end);
  }
  if (to > at) {
    quiet += to - at;
    if (to - at > least) gaps.push([at, to]);
  }
  // What was merged has pauses inside that are not gaps here; its parts hardly overlap.
  const share = merged ? Math.min(1, busy / (to - from)) : 1 - quiet / (to - from);
  return { busy: to > from ? share : 0, gaps };
}

const MAX_DEPTH = 8;

/** Spans of a lane that overlap stand below each other: `depth` of each, and of the lane. Set once for each lane. */
export function setDepths(lane) {
  if (lane.depth !== undefined) return;
  const free = [];
  for (const span of lane.spans) {
    let at = free.findIndex((end) => end <= span.start + 0.5);
    if (at < 0) at = Math.min(free.length, MAX_DEPTH - 1);
    span.depth = at;
    free[at] = Math.max(free[at] ?? -Infinity, span.end);
  }
  lane.depth = Math.max(1, free.length);
}
