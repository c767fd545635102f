// What the page knows of each run, and which runs are shown.

export class Run {
  constructor({ number, name }) {
    this.number = number;
    this.name = name;
    this.forget();
    this.facts = { recipe: {} };
    this.samples = { heldout: [], rollout: [], sheets: [] };
  }

  forget() {
    this.rows = [];
    this.bands = new Map();
    this.alarms = [];
    this.spans = 0;
    this.version = (this.version ?? 0) + 1;
  }

  take(message) {
    if (message.reset) this.forget();
    for (const row of message.metrics ?? []) this.rows.push(row);
    for (const band of message.bands ?? []) this.bands.set(band.iteration, band);
    if (message.metrics || message.bands) this.told = (this.told ?? 0) + 1;
    for (const alarm of message.alarms ?? []) this.alarms.push(alarm);
    for (const key of ["facts", "samples", "spans"]) if (message[key] !== undefined) this[key] = message[key];
  }

  /** [[iteration, value]] of the finite ones. */
  series(metric) {
    const points = [];
    for (const row of this.rows) {
      const value = row[metric];
      if (typeof value === "number") points.push([row.iteration, value]);
    }
    return points;
  }

  /** [[iteration, seven numbers]]: least sample, least group mean, quartiles, largest group mean, largest sample. */
  band(name) {
    const points = [];
    for (const band of this.bands.values()) if (band.bands[name]) points.push([band.iteration, band.bands[name]]);
    return points.sort((a, b) => a[0] - b[0]);
  }

  last(metric) {
    for (let i = this.rows.length - 1; i >= 0; i--) {
      if (typeof this.rows[i][metric] === "number") return this.rows[i][metric];
    }
    return null;
  }

  get iteration() {
    return this.rows.length ? this.rows[this.rows.length - 1].iteration : null;
  }

  get total() {
    return this.facts.recipe["run.iterations"] ?? null;
  }

  get finished() {
    const done = this.facts.summary?.iterations;
    return done !== undefined && this.iteration !== null && done >= this.iteration;
  }
}

/** More runs than this are not ticked by themselves. */
const MOST_SHOWN = 4;

export class Store extends EventTarget {
  runs = [];
  shown = new Set();
  connection = "connecting";

  listenTo(source) {
    this.source = source;
    source.listen({
      runs: ({ runs, first }) => {
        // A server that answers again tells everything again, and may be another one.
        const same = this.runs.every((run, i) => run.name === runs[i]?.name);
        if (!same) {
          this.runs = [];
          this.shown.clear();
        }
        if (first) for (const run of this.runs) run.forget();
        for (const run of runs.slice(this.runs.length)) {
          this.runs.push(new Run(run));
          if (this.runs.length <= MOST_SHOWN) this.shown.add(run.number);
        }
        this.tell("runs");
      },
      run: (message) => {
        this.runs[message.run].take(message);
        this.tell("run");
      },
      connection: (text) => {
        this.connection = text;
        this.tell("connection");
      },
    });
  }

  get visible() {
    return this.runs.filter((run) => this.shown.has(run.number));
  }

  show(number, on) {
    if (on) this.shown.add(number);
    else this.shown.delete(number);
    this.tell("runs");
  }

  tell(what) {
    this.dispatchEvent(new Event(what));
  }
}

/** Every metric that one of these runs has. */
export function metricNames(runs) {
  const names = new Set();
  for (const run of runs) for (const row of run.rows) for (const key in row) names.add(key);
  names.delete("iteration");
  names.delete("non_finite");
  return [...names].sort();
}

/** Each number of runs has its own colour: a class that style.css defines. */
export function colour(run) {
  return `run-${run.number % 8}`;
}
