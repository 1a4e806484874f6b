// SPDX-License-Identifier: Apache-2.0
// Asks a server with Anthropic's TypeScript client: `node anthropic_client.mjs URL`, in a folder that has the package.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const found = createRequire(pathToFileURL(`${process.cwd()}/`)).resolve("@anthropic-ai/sdk");
const Anthropic = createRequire(import.meta.url)(found).Anthropic;
const client = new Anthropic({ baseURL: process.argv[2], apiKey: "sesame", maxRetries: 0 });
const given = { model: "fake", max_tokens: 100 };
const hello = [{ role: "user", content: "hello" }];

const made = await client.messages.create({ ...given, messages: hello });
assert.equal(made.content[0].text, "You said: hello");

const stream = client.messages.stream({ ...given, messages: hello });
let text = "";
stream.on("text", (part) => { text += part; });
assert.equal((await stream.finalMessage()).stop_reason, "end_turn");
assert.equal(text, "You said: hello");

const weather = { name: "weather", input_schema: { type: "object", properties: { city: { type: "string" } } } };
const asked = { ...given, messages: [{ role: "user", content: "weather" }], tools: [weather] };
const called = await client.messages.stream(asked).finalMessage();
assert.deepEqual(called.content.map((block) => [block.type, block.name, block.input]), [["tool_use", "weather", { city: "Paris" }]]);
assert.equal((await client.messages.countTokens({ model: "fake", messages: hello })).input_tokens > 5, true);
await assert.rejects(client.messages.create({ ...given, model: "claude", messages: hello }), Anthropic.NotFoundError);
console.log("did: answer stream tools");
