// The times of an answer: for every step what each stage, the queues and the hops took.

import { el } from "./dom.js";

const milliseconds = (value) => value.toFixed(2);
const sum = (values) => values.reduce((all, value) => all + value, 0);

/** The steps of an answer as they come, with the text that each brought. */
export class Times {
  constructor() {
    this.steps = [];
  }

  /** Takes in what came. Text comes after the step that brings it: it belongs to the last one. */
  add(text, steps) {
    for (const step of steps) {
      this.steps.push({ ...step, text: "" });
    }
    const last = this.steps.at(-1);
    if (last) {
      last.text += text;
    }
  }

  /** Makes a part that is opened on demand; nothing if nothing was measured. */
  details() {
    if (this.steps.length === 0) {
      return null;
    }
    const n = this.steps.length;
    const node = el("details", { class: "times" },
      el("summary", {}, `Times of ${n === 1 ? "the one step" : `${n} steps`}`));
    node.addEventListener("toggle", () => node.append(this.view()), { once: true });
    return node;
  }

  view() {
    const nStages = this.steps[0].stage_infer_ms.length;
    const stages = Array.from({ length: nStages }, (_, stage) => stage);
    const head = [
      el("th", { scope: "col" }, "Text"),
      el("th", { scope: "col", class: "number" }, "Tokens"),
      el("th", { scope: "col", class: "number" }, "All"),
      ...stages.map((stage) => el("th", { scope: "col", class: "number" }, key(stage), `Stage ${stage}`)),
      el("th", { scope: "col", class: "number" }, key("queue"), "Queues"),
      el("th", { scope: "col", class: "number" }, key("hops"), "Hops"),
    ];
    const longest = Math.max(...this.steps.map((step) => step.round_trip_ms));
    const rows = this.steps.map((step) => stepRow(step, longest));
    return el("div", {
      class: "scroll", role: "group", tabindex: "0", "aria-label": "Times of each step",
    }, el("table", {},
      el("caption", {}, "Milliseconds of each step. Hops are the way through the broker."),
      el("thead", {}, el("tr", {}, ...head)),
      el("tbody", {}, ...rows),
      el("tfoot", {}, meanRow(this.steps, stages))));
  }
}

/** There are six colours of stages; they come again after them. */
function colour(part) {
  return typeof part === "number" ? part % 6 : part;
}

/** The colour of a part, for those who see it. */
function key(part) {
  return el("span", { class: "key", "data-part": colour(part), "aria-hidden": "true" });
}

function stepRow(step, longest) {
  const queues = sum(step.stage_queue_ms);
  const bar = el("span", { class: "parts", "aria-hidden": "true" });
  const parts = [
    ...step.stage_infer_ms.map((ms, stage) => [stage, ms]), ["queue", queues], ["hops", step.hops_ms],
  ];
  for (const [part, ms] of parts) {
    const piece = el("span", { "data-part": colour(part) });
    piece.style.setProperty("--part", (ms / longest).toFixed(4));
    bar.append(piece);
  }
  return el("tr", {},
    el("th", { scope: "row" }, shown(step.text), bar),
    number(String(step.tokens)), number(milliseconds(step.round_trip_ms)),
    ...step.stage_infer_ms.map((ms) => number(milliseconds(ms))),
    number(milliseconds(queues)), number(milliseconds(step.hops_ms)));
}

function meanRow(steps, stages) {
  const mean = (of) => number(milliseconds(sum(steps.map(of)) / steps.length));
  const tokens = sum(steps.map((step) => step.tokens)) / steps.length;
  return el("tr", {},
    el("th", { scope: "row" }, "Mean"),
    number(tokens.toFixed(1)), mean((step) => step.round_trip_ms),
    ...stages.map((stage) => mean((step) => step.stage_infer_ms[stage])),
    mean((step) => sum(step.stage_queue_ms)), mean((step) => step.hops_ms));
}

function number(text) {
  return el("td", { class: "number" }, text);
}

/** The text of a step with its spaces and line ends to be seen. */
function shown(text) {
  return text === ""
    ? el("span", { class: "quiet" }, "no text")
    : el("q", {}, text.replaceAll("\n", "↵").replaceAll(" ", "\u00a0"));
}
