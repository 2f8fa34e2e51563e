// Requests to the server that the page came from, and the events of an answer.

import { key } from "./store.js";

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function request(path, options = {}) {
  const headers = { ...options.headers, ...(key() ? { "X-API-Key": key() } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server does not answer. Is it running?", 0);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const wait = response.headers.get("Retry-After");
  const sentence = body?.error?.message ?? `The server answered with status ${response.status}.`;
  throw new Refused(sentence + (response.status === 429 && wait ? ` (In ${wait} seconds, say.)` : ""), response.status);
}

export const properties = async () => (await request("props")).json();

/** Return the names of the models that a request may ask for: the base, and it with each adapter. */
export const models = async () => (await (await request("v1/models")).json()).data.map(({ id }) => id);

/** Yield the objects of a chat completion's stream; throws Refused, also for an error in the stream. */
export async function* answer(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_draft: true } }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused("The connection broke off. What had come is kept.", 0);
    }
    if (part.done) throw new Refused("The answer ended early. What had come is kept.", 0);
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith(": reading")) yield { reading: line.slice(2) };
      if (!line.startsWith("data: ")) continue;
      const found = JSON.parse(line.slice(6));
      if (found.error) throw new Refused(found.error.message, 0);
      yield found;
    }
  }
}
