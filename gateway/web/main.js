// Puts the parts together: colours, key, the stream of the fleet, the chat.

import { KeyNeeded, events, hasKey, request, useKey } from "./ask.js";
import { Chat } from "./chat.js";
import { setText } from "./dom.js";
import { Fleet } from "./fleet.js";

/** Pauses before the stream is asked for again, in milliseconds; the last one holds. */
const PAUSES = [500, 1000, 2000, 5000];

/** The gateway sends something every ten seconds; a stream that is silent for longer is dead. */
const SILENCE = 25_000;

const byId = (id) => document.getElementById(id);

const chat = new Chat(() => askForKey());
const fleet = new Fleet((models) => chat.offer(models));

function showConnection(state, text) {
  const pill = byId("connection");
  pill.dataset.state = state;
  setText(pill, text);
  byId("fleet").classList.toggle("stale", state !== "live");
}

function showWay(snapshot) {
  const way = byId("way");
  way.hidden = snapshot.round_trip_ms === null;
  if (!way.hidden) {
    setText(way, `${snapshot.round_trip_ms.toFixed(2)} ms to the broker and back`);
  }
}

function askForKey() {
  const form = byId("key-form");
  form.hidden = false;
  setText(byId("key-why"), hasKey()
    ? "The gateway does not know this key."
    : "This gateway answers those who show a key. It is kept until the tab is closed.");
  byId("key").focus();
}

/** Waits until the user has given a key. */
function keyGiven() {
  askForKey();
  return new Promise((resolve) => {
    byId("key-form").addEventListener("submit", () => resolve(), { once: true });
  });
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim());
  byId("key").value = "";
  byId("key-form").hidden = true;
  byId("chat-text").focus();
});

/** Follows the fleet until the stream ends or breaks. */
async function follow() {
  const dead = new AbortController();
  let alarm;
  const lives = () => {
    clearTimeout(alarm);
    alarm = setTimeout(() => dead.abort(), SILENCE);
  };
  lives();
  try {
    const response = await request("fleet/events", { signal: dead.signal });
    for await (const data of events(response)) {
      lives();
      if (data !== null) {
        const snapshot = JSON.parse(data);
        showConnection("live", "live");
        showWay(snapshot);
        fleet.show(snapshot);
        byId("key-form").hidden = true;
      }
    }
  } finally {
    clearTimeout(alarm);
  }
}

async function followForEver() {
  let n_failed = 0;
  for (;;) {
    const began = performance.now();
    try {
      await follow();
    } catch (error) {
      if (error instanceof KeyNeeded) {
        showConnection("key", "needs a key");
        await keyGiven();
        continue;
      }
    }
    // A stream that stood for a while was no failure.
    n_failed = performance.now() - began > 10_000 ? 0 : n_failed + 1;
    showConnection("lost", "no answer, trying again");
    const pause = PAUSES[Math.min(n_failed, PAUSES.length - 1)];
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

const theme = byId("theme");
theme.value = localStorage.getItem("stagebus-theme") ?? "system";
theme.addEventListener("change", () => {
  const root = document.documentElement;
  if (theme.value === "system") {
    localStorage.removeItem("stagebus-theme");
    delete root.dataset.theme;
  } else {
    localStorage.setItem("stagebus-theme", theme.value);
    root.dataset.theme = theme.value;
  }
});

followForEver();
