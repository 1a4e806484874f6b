// SPDX-License-Identifier: Apache-2.0
// Asks a server with OpenAI's TypeScript client: `node openai_client.mjs URL`, in a folder that has the package.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const there = createRequire(pathToFileURL(`${process.cwd()}/`));
const { OpenAI } = there("openai");
const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "sesame", maxRetries: 0 });
const hello = { model: "fake", messages: [{ role: "user", content: "hello" }] };

assert.equal((await client.chat.completions.create(hello)).choices[0].message.content, "You said: hello");
let text = "";
for await (const part of await client.chat.completions.create({ ...hello, stream: true })) text += part.choices[0]?.delta.content ?? "";
assert.equal(text, "You said: hello");

const parameters = { type: "object", properties: { city: { type: "string" } } };
const asked = {
  model: "fake",
  messages: [{ role: "user", content: "weather" }],
  tools: [{ type: "function", function: { name: "weather", parameters } }],
};
const [call] = (await client.chat.completions.stream(asked).finalChatCompletion()).choices[0].message.tool_calls;
assert.deepEqual([call.function.name, JSON.parse(call.function.arguments)], ["weather", { city: "Paris" }]);

const { zodResponseFormat } = there("openai/helpers/zod");
const { z } = there("zod");
const format = zodResponseFormat(z.object({ name: z.string(), age: z.number() }), "person");
const person = { model: "fake", messages: [{ role: "user", content: "person" }], response_format: format };
assert.deepEqual((await client.chat.completions.parse(person)).choices[0].message.parsed, { name: "Ann", age: 30 });

assert.equal((await client.responses.create({ model: "fake", input: "hello" })).output_text, "You said: hello");
assert.equal((await client.embeddings.create({ model: "fake", input: "ab" })).data[0].embedding[3], 2);
await assert.rejects(client.chat.completions.create({ ...hello, model: "none" }), OpenAI.NotFoundError);
console.log("did: answer stream tools structure embeddings");
