// The chat: asks the gateway as any client of its HTTP API does, and shows the answer as it comes.

import { KeyNeeded, events, request } from "./ask.js";
import { el, setText } from "./dom.js";
import { Times } from "./times.js";

const byId = (id) => document.getElementById(id);

/** What the user and the model have said. */
export class Chat {
  /** `needKey` is called when the gateway wants a key. */
  constructor(needKey) {
    this.needKey = needKey;
    this.messages = [];
    this.running = null;
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("chat-text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    byId("chat-stop").addEventListener("click", () => this.running?.abort());
    byId("chat-new").addEventListener("click", () => this.begin());
    this.offer([]);
  }

  /** Offers the models that are served; the chosen one stays chosen. */
  offer(models) {
    const select = byId("chat-model");
    const chosen = select.value;
    select.replaceChildren(...models.map((name) => el("option", { value: name }, name)));
    if (models.length === 0) {
      select.append(el("option", { value: "" }, "none is served"));
    } else if (models.includes(chosen)) {
      select.value = chosen;
    }
    select.disabled = models.length === 0;
    this.showRunning();
  }

  /** Forgets what was said. */
  begin() {
    this.running?.abort();
    this.messages = [];
    byId("turns").replaceChildren();
    byId("chat-empty").hidden = false;
    setText(byId("said"), "");
    byId("chat-text").focus();
  }

  showRunning() {
    byId("chat-stop").hidden = this.running === null;
    byId("chat-send").disabled = this.running !== null || byId("chat-model").value === "";
  }

  async send() {
    const text = byId("chat-text").value.trim();
    if (text === "" || byId("chat-send").disabled) {
      return;
    }
    byId("chat-text").value = "";
    byId("chat-empty").hidden = true;
    const conversation = this.messages;
    const asked = [...conversation, { role: "user", content: text }];
    addTurn("You", "mine").words.append(text);
    const answer = new Answer(byId("chat-model").value);
    const stop = new AbortController();
    this.running = stop;
    this.showRunning();
    try {
      await answer.read(asked, stop.signal);
      conversation.push(asked.at(-1), { role: "assistant", content: answer.text });
    } catch (error) {
      if (error.name === "AbortError") {
        answer.end("stopped");
        conversation.push(asked.at(-1), { role: "assistant", content: answer.text });
      } else {
        answer.fail(error.message);
        byId("chat-text").value ||= text;
        if (error instanceof KeyNeeded) {
          this.needKey();
        }
      }
    }
    if (this.running === stop) {
      this.running = null;
      this.showRunning();
    }
  }
}

/** Adds a turn to the conversation. */
function addTurn(who, looks) {
  const words = el("div", { class: "words" });
  const turn = el("li", { class: `turn ${looks}` }, el("p", { class: "who" }, who), words);
  byId("turns").append(turn);
  turn.scrollIntoView({ block: "nearest" });
  return { turn, words };
}

/** Numbers of the options; what is no number is left to the gateway's default. */
function options() {
  const number = (id) => {
    const value = byId(id).valueAsNumber;
    return Number.isFinite(value) ? value : undefined;
  };
  return { max_tokens: number("max-tokens"), temperature: number("temperature") };
}

/** An answer as it comes. */
class Answer {
  constructor(model) {
    this.model = model;
    this.text = "";
    this.times = new Times();
    this.began = performance.now();
    this.first = null;
    this.usage = null;
    const { turn, words } = addTurn(model, "theirs");
    this.turn = turn;
    this.words = words;
    this.shown = document.createTextNode("");
    words.append(this.shown);
    turn.setAttribute("aria-busy", "true");
  }

  async read(messages, signal) {
    const body = {
      model: this.model,
      messages,
      ...options(),
      stream: true,
      stream_options: { include_usage: true, include_timings: byId("timings").checked },
    };
    const response = await request("v1/chat/completions", { body, signal });
    let reason = null;
    for await (const data of events(response)) {
      if (data === null) {
        continue;
      }
      if (data === "[DONE]") {
        this.end(reason === "length" ? "at the most tokens" : null);
        return;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) {
        throw new Error(chunk.error.message);
      }
      this.usage = chunk.usage ?? this.usage;
      reason = chunk.choices[0]?.finish_reason ?? reason;
      this.add(chunk.choices[0]?.delta?.content ?? "", chunk.steps ?? []);
    }
    throw new Error("the answer broke off");
  }

  add(text, steps) {
    this.times.add(text, steps);
    if (text === "") {
      return;
    }
    this.first ??= performance.now();
    this.text += text;
    const list = byId("turns");
    const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    this.shown.appendData(text);
    if (isAtEnd) {
      list.scrollTop = list.scrollHeight;
    }
  }

  /** Ends the answer; those who do not see it hear it now, and once. */
  end(how) {
    this.turn.removeAttribute("aria-busy");
    const parts = [];
    if (this.usage !== null) {
      const n = this.usage.completion_tokens;
      parts.push(`${n} ${n === 1 ? "token" : "tokens"}`);
      const seconds = (performance.now() - (this.first ?? this.began)) / 1000;
      if (n > 1 && seconds > 0) {
        parts.push(`${((n - 1) / seconds).toFixed(1)} tokens/s`);
      }
    }
    if (this.first !== null) {
      parts.push(`first text after ${Math.round(this.first - this.began)} ms`);
    }
    if (how !== null) {
      parts.push(how);
    }
    const more = [el("p", { class: "quiet" }, parts.join(", "))];
    const times = this.times.details();
    if (times) {
      more.push(times);
    }
    this.turn.append(...more);
    this.turn.scrollIntoView({ block: "nearest" });
    setText(byId("said"), `${this.model} says: ${this.text}`);
  }

  fail(why) {
    this.turn.removeAttribute("aria-busy");
    this.turn.append(el("p", { class: "problem", role: "alert" }, `No answer: ${why}`));
    this.turn.scrollIntoView({ block: "nearest" });
  }
}
