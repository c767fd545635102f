// Where data come from: a server that reads run folders, or the file that this page is.

export function openSource() {
  const exported = document.getElementById("exported");
  return exported ? new Exported(JSON.parse(exported.textContent)) : new Live();
}

class Live {
  live = true;

  /** on: {runs, run, connection}, called with what the server says. */
  listen(on) {
    const stream = new EventSource("/api/stream");
    stream.addEventListener("runs", (event) => on.runs(JSON.parse(event.data)));
    stream.addEventListener("run", (event) => on.run(JSON.parse(event.data)));
    stream.addEventListener("open", () => on.connection("live"));
    stream.addEventListener("error", () => on.connection("the server does not answer; trying again"));
  }

  async samples(run, kind, iteration) {
    const folder = `/runs/${run}/samples/${kind}/step_${String(iteration).padStart(8, "0")}`;
    const response = await fetch(`${folder}/samples.json`);
    if (!response.ok) return [];
    const rows = (await response.json()).samples;
    const at = (name) => name && `${folder}/${name}`;
    return rows.map((row) => ({ ...row, picture: at(row.picture), clip: at(row.clip) }));
  }

  sheet(run, iteration) {
    return `/runs/${run}/samples/step_${String(iteration).padStart(8, "0")}.png`;
  }

  async groups(run, iteration) {
    return (await ask(`/api/runs/${run}/groups?iteration=${iteration}`)).groups;
  }

  /** window: {from, to} in microseconds, or {since} a number of spans; unset = all. */
  spans(run, window = {}) {
    return ask(`/api/runs/${run}/spans?${new URLSearchParams(window)}`);
  }
}

async function ask(url) {
  const response = await fetch(url);
  if (!response.ok) throw new Error(`${url}: ${response.status}`);
  return response.json();
}

class Exported {
  live = false;

  constructor(data) {
    this.data = data;
  }

  listen(on) {
    on.runs({ runs: this.data.runs, first: true });
    for (const message of this.data.messages) on.run(message);
    on.connection(this.data.note);
  }

  async samples(run, kind, iteration) {
    return this.data.samples[run]?.[kind]?.[iteration] ?? [];
  }

  sheet(run, iteration) {
    return this.data.sheets[run]?.[iteration] ?? "";
  }

  async groups(run, iteration) {
    return this.data.groups[run]?.[iteration] ?? [];
  }

  async spans(run) {
    return this.data.spans[run];
  }
}
