// SPDX-License-Identifier: Apache-2.0
// Requests to the server, at addresses relative to the page's own, so that it works below a proxy's path.

import { getKey } from "./store.js";

function headers(more = {}) {
  const key = getKey();
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

/** An error from the server. */
export class ServerError extends Error {
  constructor(message, status, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function serverError(answer) {
  try {
    const { message, code } = (await answer.json()).error;
    return new ServerError(message, answer.status, code);
  } catch {
    // no error of the API: of a proxy, for example
    return new ServerError(`The server answered with ${answer.status}.`, answer.status);
  }
}

export async function models() {
  const answer = await fetch("v1/models", { headers: headers() });
  if (!answer.ok) throw await serverError(answer);
  return (await answer.json()).data;
}

/** The data of a stream's events, as they come. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      text += value;
      let end;
      while ((end = text.indexOf("\n\n")) >= 0) {
        const lines = text.slice(0, end).split("\n");
        text = text.slice(end + 2);
        const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The parts of an answer as they come: {content, reasoning, calls, finish, usage}. */
export async function* chat(body, signal) {
  const answer = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!answer.ok) throw await serverError(answer);
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") return;
    const chunk = parsed(data);
    if (chunk.error) throw new ServerError(chunk.error.message, 200);
    const choice = chunk.choices[0];
    yield {
      content: choice?.delta.content ?? "",
      reasoning: choice?.delta.reasoning_content ?? "",
      calls: choice?.delta.tool_calls ?? [],
      finish: choice?.finish_reason ?? null,
      usage: chunk.usage ?? null,
    };
  }
  // A proxy may end a stream that the server has not ended.
  throw new ServerError("The connection has ended before the answer was complete.", answer.status);
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ServerError(`The server has sent what is no part of an answer: ${data.slice(0, 200)}`, 200);
  }
}
