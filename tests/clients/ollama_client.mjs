// SPDX-License-Identifier: Apache-2.0
// Asks a server with Ollama's JavaScript client: `node ollama_client.mjs URL`, in a folder that has the package.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const found = createRequire(pathToFileURL(`${process.cwd()}/`)).resolve("ollama");
const { Ollama } = createRequire(import.meta.url)(found);
const client = new Ollama({ host: process.argv[2], headers: { Authorization: "Bearer sesame" } });
const model = "fake";
const messages = [{ role: "user", content: "hello" }];

assert.equal((await client.chat({ model, messages })).message.content, "You said: hello");
let text = "";
for await (const part of await client.chat({ model, messages, stream: true })) text += part.message.content;
assert.equal(text, "You said: hello");

const parameters = { type: "object", properties: { city: { type: "string" } } };
const tools = [{ type: "function", function: { name: "weather", description: "Tells it.", parameters } }];
const called = await client.chat({ model, messages: [{ role: "user", content: "weather" }], tools });
assert.deepEqual(called.message.tool_calls[0].function.arguments, { city: "Paris" });

assert.equal((await client.generate({ model, prompt: "hello" })).response, "You said: hello");
assert.equal((await client.embed({ model, input: "abc" })).embeddings[0][3], 3);
assert.deepEqual((await client.list()).models.map((each) => each.name), ["fake"]);
assert.ok((await client.show({ model })).capabilities.includes("completion"));
await assert.rejects(client.chat({ model: "llama3", messages }), /no model 'llama3'/);

const format = { type: "object", properties: { name: { type: "string" }, age: { type: "integer" } } };
const person = await client.chat({ model, messages: [{ role: "user", content: "person" }], format });
assert.deepEqual(JSON.parse(person.message.content), { name: "Ann", age: 30 });
console.log("did: answer stream tools structure embeddings");
