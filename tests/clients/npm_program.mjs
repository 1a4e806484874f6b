// SPDX-License-Identifier: Apache-2.0
// Runs a program of npm's that asks a server: `node npm_program.mjs URL promptfoo|claude`, in a folder that has the package.

import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { mkdtempSync, readFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const [url, name] = process.argv.slice(2);
const home = mkdtempSync(join(tmpdir(), "home-"));

function run(words, environment) {
  const program = join(process.cwd(), "node_modules", ".bin", name);
  const env = { ...process.env, HOME: home, ...environment };
  const done = spawnSync(program, words, { cwd: home, env, encoding: "utf8", timeout: 300_000 });
  assert.equal(done.status, 0, done.stdout + done.stderr);
  return done.stdout;
}

if (name === "promptfoo") {
  const off = { PROMPTFOO_DISABLE_TELEMETRY: "1", PROMPTFOO_DISABLE_UPDATE: "1", PROMPTFOO_CONFIG_DIR: home };
  const config = fileURLToPath(new URL("promptfoo.yaml", import.meta.url));
  const said = run(["eval", "--no-cache", "--no-progress-bar", "-c", config], { SERVER_URL: url, ...off });
  assert.match(said, /1 passed/);
  console.log("did: answer");
} else {
  const model = { ANTHROPIC_MODEL: "fake", ANTHROPIC_DEFAULT_HAIKU_MODEL: "fake" };
  const where = { ANTHROPIC_BASE_URL: url, ANTHROPIC_AUTH_TOKEN: "sesame", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1" };
  const said = run(["-p", "hello"], { ...model, ...where });
  assert.match(said, /You said: [^]*hello/);
  run(["-p", "use the shell", "--allowedTools", "Bash"], { ...model, ...where });
  assert.equal(readFileSync(join(home, "said.txt"), "utf8"), "hello\n");
  console.log("did: answer stream tools");
}
