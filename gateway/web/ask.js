// Requests to the gateway, with the key that the user gave, and streams of events.

const STORED = "stagebus-key";

/** The gateway wants a key, or another one. */
export class KeyNeeded extends Error {}

/** Keeps a key until the tab is closed. */
export function useKey(key) {
  sessionStorage.setItem(STORED, key);
}

/** Whether a key was given. */
export function hasKey() {
  return sessionStorage.getItem(STORED) !== null;
}

/** Sends a request; answers other than success are errors with the gateway's own words. */
export async function request(path, { body, signal } = {}) {
  const headers = {};
  const key = sessionStorage.getItem(STORED);
  if (key !== null) {
    headers.Authorization = `Bearer ${key}`;
  }
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
  }
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
    credentials: "same-origin",
  });
  if (response.status === 401) {
    throw new KeyNeeded("a key is needed");
  }
  if (!response.ok) {
    throw new Error(await whatIsWrong(response));
  }
  return response;
}

async function whatIsWrong(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the gateway answers with status ${response.status}`;
  }
}

/**
 * Reads a stream of events and yields the data of each; `null` for a comment, which shows that the
 * stream lives. (`EventSource` cannot send a key.)
 */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) {
        return;
      }
      const parts = (held + value).split("\n\n");
      held = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data: "));
        yield data.length === 0 ? null : data.map((line) => line.slice(6)).join("\n");
      }
    }
  } finally {
    await reader.cancel();
  }
}
