// The fleet: models, their stages, workers and coordinators, and what happened to them.

import { el, keyed, row, setAttributes, setText, svg, table } from "./dom.js";

/** How long a worker or coordinator that is gone stays in its table, in milliseconds. */
const SHOWN_GONE = 30_000;

/** Entries of the list of what happened. */
const MAX_NEWS = 50;

/** Size of the curve's drawing. */
const CURVE = { width: 240, height: 48 };

const WORKER_COLUMNS = [
  { name: "Worker" }, { name: "Stage", number: true }, { name: "State" },
  { name: "Sessions", number: true }, { name: "Queue", number: true },
  { name: "Steps/s", number: true }, { name: "Rows/s", number: true },
  { name: "Step ms", number: true }, { name: "KV memory" }, { name: "Where" },
];

const COORDINATOR_COLUMNS = [
  { name: "Coordinator" }, { name: "State" }, { name: "Sessions", number: true },
  { name: "Tokens/s", number: true }, { name: "Drafted/s", number: true },
  { name: "Accepted/s", number: true }, { name: "Requests", number: true },
  { name: "Replays", number: true }, { name: "Host" },
];

const byId = (id) => document.getElementById(id);
const percent = (part) => `${Math.round(part * 100)} %`;
const whole = (n) => n.toLocaleString("en");
const count = (n, one, many) => `${n} ${n === 1 ? one : many}`;

/** What a problem means; the gateway names its kind. */
function problemText(problem) {
  switch (problem.problem) {
    case "no_coordinator":
      return problem.n_leaving > 0
        ? `No coordinator takes requests, ${problem.n_leaving} leaving.`
        : "No coordinator is there.";
    case "stage_empty": {
      const parts = [`Stage ${problem.stage} has nobody`];
      if (problem.n_starting > 0) {
        parts.push(`${problem.n_starting} starting`);
      }
      if (problem.n_leaving > 0) {
        parts.push(`${problem.n_leaving} leaving`);
      }
      if (problem.n_other_shards > 0) {
        parts.push(`${problem.n_other_shards} with other shards than the coordinator`);
      }
      return `${parts.join(", ")}.`;
    }
    case "mixed_shards":
      return `Coordinators hold different shards: ${
        problem.fingerprints.map((fingerprint) => fingerprint.slice(0, 12)).join(", ")}.`;
    default:
      return `${problem.problem}.`;
  }
}

/** A worker as its row shows it. */
function workerEntry(model, rates) {
  const { worker } = rates;
  const { load } = worker;
  let state = worker.state;
  if (rates.is_stuck) {
    state = `stuck for ${Math.round(load.busy_ms / 1000)} s`;
  } else if (load.losses > 0) {
    state = `${state}, ${count(load.losses, "loss", "losses")}`;
  }
  const kv = rates.kv_part === null
    ? `${(load.kv_bytes / 2 ** 20).toFixed(0)} MiB`
    : percent(rates.kv_part);
  return {
    id: worker.worker,
    what: `worker ${worker.worker} of ${model}, stage ${worker.stage}`,
    looks: rates.is_stuck ? "bad" : worker.state === "ready" ? "good" : "warn",
    state,
    kvPart: rates.kv_part,
    cells: [
      worker.worker, String(worker.stage), state, `${load.n_sessions}/${load.max_sessions}`,
      String(load.queue_depth), rates.steps_s.toFixed(1), rates.rows_s.toFixed(1),
      (load.decode_us / 1000).toFixed(2), kv, `${worker.device} of ${worker.host}`,
    ],
  };
}

/** A coordinator as its row shows it. */
function coordinatorEntry(model, rates) {
  const { coordinator } = rates;
  const state = coordinator.accepting ? "ready" : "draining";
  return {
    id: coordinator.coordinator,
    what: `coordinator ${coordinator.coordinator} of ${model}`,
    looks: coordinator.accepting ? "good" : "warn",
    state,
    cells: [
      coordinator.coordinator, state, String(coordinator.n_sessions), rates.tok_s.toFixed(1),
      rates.drafted_s.toFixed(1), rates.accepted_s.toFixed(1), whole(coordinator.requests_done),
      String(coordinator.recoveries), coordinator.host,
    ],
  };
}

/** A table of members that remembers for a while who is gone. */
class Members {
  constructor(caption, columns, state, kv) {
    this.columns = columns;
    this.stateColumn = state;
    this.kvColumn = kv;
    const { node, body } = table(caption, columns);
    this.node = node;
    this.body = body;
    this.shown = new Map();
    this.gone = new Map();
  }

  /** Shows who is there; returns who came and who left. */
  show(entries, now) {
    const there = new Map(entries.map((entry) => [entry.id, entry]));
    const came = entries.filter((entry) => !this.shown.has(entry.id));
    const left = [...this.shown.values()].filter((entry) => !there.has(entry.id));
    for (const entry of left) {
      this.gone.set(entry.id, { ...entry, looks: "bad", state: "gone", at: now });
    }
    for (const [id, { at }] of this.gone) {
      if (there.has(id) || now - at > SHOWN_GONE) {
        this.gone.delete(id);
      }
    }
    this.shown = there;
    this.node.hidden = there.size + this.gone.size === 0;
    keyed(this.body, [...entries, ...this.gone.values()], (entry) => entry.id,
      () => row(this.columns, 0), (node, entry) => this.update(node, entry));
    return { came, left };
  }

  update(node, entry) {
    node.classList.toggle("gone", entry.state === "gone");
    entry.cells.forEach((text, i) => {
      const cell = node.children[i];
      if (i === this.stateColumn) {
        setText(cell, entry.state);
        cell.dataset.looks = entry.looks;
      } else if (i === this.kvColumn && entry.kvPart !== null) {
        showBar(cell, text, entry.kvPart);
      } else {
        setText(cell, text);
      }
    });
  }
}

/** A share as text with a bar beside it, which says nothing more to those who do not see it. */
function showBar(cell, text, part) {
  if (cell.children.length === 0) {
    cell.replaceChildren(
      el("span", { class: "bar", "aria-hidden": "true" }, el("span")), el("span"));
  }
  const [bar, words] = cell.children;
  bar.firstElementChild.style.setProperty("--part", Math.min(part, 1).toFixed(3));
  setText(words, text);
}

/** The curve of tokens per second. */
class Curve {
  constructor() {
    this.area = svg("path", { class: "area" });
    this.line = svg("path", { class: "line" });
    this.title = svg("title");
    this.node = svg("svg", {
      class: "curve", role: "img", preserveAspectRatio: "none",
      viewBox: `0 0 ${CURVE.width} ${CURVE.height}`,
    }, this.title, this.area, this.line);
  }

  show(history) {
    const highest = Math.max(...history, 1e-9);
    const { width, height } = CURVE;
    // The latest value is at the right edge; a short history leaves the left one free.
    const step = width / 59;
    const points = history.map((rate, i) => {
      const x = width - (history.length - 1 - i) * step;
      const y = height - 2 - (rate / highest) * (height - 6);
      return `${x.toFixed(1)} ${y.toFixed(1)}`;
    });
    const line = points.length > 1 ? `M${points.join("L")}` : "";
    const start = width - (history.length - 1) * step;
    setAttributes(this.line, { d: line });
    setAttributes(this.area, {
      d: line && `${line}L${width} ${height}L${start.toFixed(1)} ${height}Z`,
    });
    const now = history.at(-1) ?? 0;
    const most = Math.max(...history, 0);
    setText(this.title, `Tokens per second of the last minute: ${
      now.toFixed(1)} now, ${most.toFixed(1)} at most`);
  }
}

/** One model. */
class Model {
  constructor({ model }) {
    this.name = model;
    const id = `model-${model}`;
    this.badge = el("span", { class: "badge" });
    this.problems = el("ul", { class: "problems", "aria-label": "Problems" });
    this.figures = el("dl", { class: "figures" });
    this.curve = new Curve();
    this.stages = el("ol", { class: "stages", "aria-label": "Stages, in order" });
    this.workers = new Members("Workers", WORKER_COLUMNS, 2, 8);
    this.coordinators = new Members("Coordinators", COORDINATOR_COLUMNS, 1, -1);
    this.wasServed = null;
    this.node = el("article", { class: "panel model", "aria-labelledby": id },
      el("header", {}, el("h3", { id }, model), this.badge),
      this.problems,
      el("div", { class: "numbers" }, this.figures, this.curve.node),
      this.stages, this.workers.node, this.coordinators.node);
  }

  /** Shows the model; returns what is new as texts, each with how it looks. */
  show(rates, now) {
    setText(this.badge, rates.served ? "served" : "cannot be served");
    this.badge.dataset.looks = rates.served ? "good" : "bad";
    keyed(this.problems, rates.problems.map(problemText), (text) => text,
      (text) => el("li", {}, text), () => {});
    this.problems.hidden = rates.problems.length === 0;
    this.showFigures(rates);
    this.curve.show(rates.history);
    this.showStages(rates);
    const workers = this.workers.show(
      rates.workers.map((worker) => workerEntry(this.name, worker)), now);
    const coordinators = this.coordinators.show(
      rates.coordinators.map((one) => coordinatorEntry(this.name, one)), now);
    const news = [];
    for (const { came, left } of [workers, coordinators]) {
      news.push(...left.map(({ what }) => [`${what}, is gone`, "bad"]));
      news.push(...came.map(({ what }) => [`${what}, is there`, "good"]));
    }
    if (this.wasServed !== null && this.wasServed !== rates.served) {
      news.push(rates.served
        ? [`${this.name} is served again`, "good"]
        : [`${this.name} cannot be served`, "bad"]);
    }
    this.wasServed = rates.served;
    return news;
  }

  showFigures(rates) {
    const sum = (of) => rates.coordinators.reduce((all, one) => all + of(one.coordinator), 0);
    const figures = [
      ["Tokens/s", rates.tok_s.toFixed(1)],
      ["Sessions", String(rates.sessions)],
      ["Drafts accepted", rates.acceptance === null ? "none now" : percent(rates.acceptance)],
      ["Tokens", whole(sum((one) => one.tokens_out))],
      ["Requests", whole(sum((one) => one.requests_done))],
      ["Replays", String(sum((one) => one.recoveries))],
    ];
    keyed(this.figures, figures, ([name]) => name,
      ([name]) => el("div", {}, el("dt", {}, name), el("dd")),
      (node, [, value]) => setText(node.lastElementChild, value));
  }

  showStages(rates) {
    const stages = Array.from({ length: rates.n_stages }, (_, stage) => ({
      stage,
      workers: rates.workers.filter(({ worker }) => worker.stage === stage),
    }));
    keyed(this.stages, stages, ({ stage }) => String(stage),
      ({ stage }) => el("li", {}, el("strong", {}, `Stage ${stage}`), el("span"), el("span"), el("span")),
      (node, { stage, workers }) => {
        const [, layers, who, time] = node.children;
        const ready = workers.filter(({ worker }) => worker.state === "ready");
        node.dataset.looks = ready.length > 0 ? "good" : "bad";
        node.style.setProperty("--stage", `var(--stage-${stage % 6})`);
        if (workers.length === 0) {
          setText(who, "nobody");
          setText(time, "");
          return;
        }
        const { first_layer, end_layer } = workers[0].worker;
        setText(layers, `layers ${first_layer} to ${end_layer - 1}`);
        setText(who, count(workers.length, "worker", "workers"));
        const slowest = Math.max(...workers.map(({ worker }) => worker.load.decode_us));
        setText(time, slowest === 0 ? "no step yet" : `${(slowest / 1000).toFixed(2)} ms a step`);
      });
  }
}

/** Everything that is known of the fleet. */
export class Fleet {
  /** `tell` hears the names of the models that are served, when they change. */
  constructor(tell) {
    this.tell = tell;
    this.models = new Map();
    this.told = null;
    this.isFirst = true;
    // Those who are gone leave the tables after a while, also when nothing else happens.
    setInterval(() => this.last && this.show(this.last), 5000);
  }

  show(snapshot) {
    this.last = snapshot;
    const now = performance.now();
    const names = new Set(snapshot.models.map(({ model }) => model));
    for (const [name, model] of this.models) {
      if (!names.has(name)) {
        this.models.delete(name);
        this.note(`nobody of ${model.name} announces itself any more`, "bad");
      }
    }
    keyed(byId("models"), snapshot.models, ({ model }) => model,
      (rates) => {
        const model = new Model(rates);
        this.models.set(rates.model, model);
        return model.node;
      },
      (_, rates) => {
        for (const [text, looks] of this.models.get(rates.model).show(rates, now)) {
          this.note(text, looks);
        }
      });
    byId("empty").hidden = names.size > 0;
    setText(byId("empty"), "Nobody announces itself on the broker.");
    this.alarm(snapshot);
    const served = snapshot.models.filter((model) => model.served).map(({ model }) => model);
    if (String(served) !== this.told) {
      this.told = String(served);
      this.tell(served);
    }
    this.isFirst = false;
  }

  alarm({ connected, strangers }) {
    const parts = strangers.map(({ subject, error }) =>
      `The announcement on ${subject} cannot be read: ${error}.`);
    if (!connected) {
      parts.unshift("The gateway has lost its connection to the broker.");
    }
    byId("alarm").hidden = parts.length === 0;
    setText(byId("alarm"), parts.join(" "));
  }

  /** Adds to what happened. Who is there when the page is opened is no news. */
  note(text, looks) {
    if (this.isFirst) {
      return;
    }
    const time = new Date();
    const news = byId("news");
    news.prepend(el("li", { "data-looks": looks },
      el("time", { datetime: time.toISOString() }, time.toLocaleTimeString("en-GB")), ` ${text}`));
    while (news.children.length > MAX_NEWS) {
      news.lastElementChild.remove();
    }
    byId("no-news").hidden = true;
  }
}
