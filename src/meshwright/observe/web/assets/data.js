// Where the runs come from: written into the page, or from the server, everything first and then what has changed.

export function embedded() {
  const held = document.getElementById("embedded");
  return held ? JSON.parse(held.textContent) : null;
}

export function follow(received, linked) {
  let data = null;
  let source = null;
  const open = () => {
    source = new EventSource("/events");
    source.onopen = () => linked(true);
    source.onmessage = (event) => {
      const message = JSON.parse(event.data);
      if (message.all) data = message.all;
      else if (data) merge(data, message.changes);
      if (data) received(data);
    };
    source.onerror = () => {
      linked(false);
      // After an answer that is no stream a browser does not ask again by itself.
      if (source.readyState === EventSource.CLOSED) setTimeout(open, 3000);
    };
  };
  open();
  addEventListener("pagehide", () => source.close());
  addEventListener("pageshow", (event) => {
    if (event.persisted) open();
  });
}

export function merge(data, changes) {
  changes.runs.forEach((change, place) => {
    const run = data.runs[place];
    Object.assign(run, change.changed);
    for (const name of change.gone) delete run.curves[name];
    for (const [name, [keep, steps, values]] of Object.entries(change.grown)) {
      const [hadSteps, hadValues] = run.curves[name] ?? [[], []];
      run.curves[name] = [[...hadSteps.slice(0, keep), ...steps], [...hadValues.slice(0, keep), ...values]];
    }
  });
}
