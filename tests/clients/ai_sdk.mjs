// SPDX-License-Identifier: Apache-2.0
// Asks a server with Vercel's AI SDK: `node ai_sdk.mjs URL`, in a folder that has the packages.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const there = createRequire(pathToFileURL(`${process.cwd()}/`));
const load = (name) => import(pathToFileURL(there.resolve(name)));
const { generateObject, generateText, streamText, tool, stepCountIs } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const provider = createOpenAICompatible({ name: "ours", baseURL: `${process.argv[2]}/v1`, apiKey: "sesame" });
const given = { model: provider("fake"), maxRetries: 0 };

assert.equal((await generateText({ ...given, prompt: "hello" })).text, "You said: hello");
let text = "";
for await (const part of streamText({ ...given, prompt: "hello" }).textStream) text += part;
assert.equal(text, "You said: hello");

const cities = [];
const weather = tool({
  description: "The weather in a city",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => (cities.push(city), "sunny"),
});
const answer = await generateText({ ...given, prompt: "weather", tools: { weather }, stopWhen: stepCountIs(3) });
assert.deepEqual([answer.text, cities], ["You said: weather", ["Paris"]]);

const schema = z.object({ name: z.string(), age: z.number() });
assert.deepEqual((await generateObject({ ...given, prompt: "person", schema })).object, { name: "Ann", age: 30 });
console.log("did: answer stream tools structure");
