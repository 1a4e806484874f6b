// SPDX-License-Identifier: Apache-2.0
// Bundles what the chat page uses of npm's packages into src/anyaccel/serve/page/vendor: make page-libraries

import { build } from "esbuild";
import { cp, mkdir, readFile, readdir, rm, writeFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";

const here = fileURLToPath(new URL(".", import.meta.url));
const target = fileURLToPath(new URL("../../src/anyaccel/serve/page/vendor/", import.meta.url));
const packages = `${here}node_modules/`;
const { dependencies } = JSON.parse(await readFile(`${here}package.json`));
// File -> what it exports. The page loads highlight.js and katex.js only where an answer has code or formulas.
const BUNDLES = {
  "text.js": 'export { Marked } from "marked"; export { default as DOMPurify } from "dompurify";',
  "highlight.js": 'export { default } from "highlight.js/lib/common";',
  "katex.js": 'export { default } from "katex";',
  "idb.js": 'export { openDB } from "idb";',
};

await rm(target, { recursive: true, force: true });
await mkdir(`${target}fonts`, { recursive: true });
for (const [name, contents] of Object.entries(BUNDLES)) {
  await build({
    stdin: { contents, resolveDir: here },
    outfile: target + name,
    bundle: true,
    minify: true,
    format: "esm",
    target: "es2022",
    legalComments: "none", // LICENSES has them whole
    logLevel: "warning",
  });
}
const sheet = await readFile(`${packages}katex/dist/katex.min.css`, "utf8");
await writeFile(`${target}katex.css`, `${sheet.replace(/,url\([^)]+\) format\("(?:woff|truetype)"\)/g, "")}\n`);
for (const font of await readdir(`${packages}katex/dist/fonts`)) {
  if (font.endsWith(".woff2")) await cp(`${packages}katex/dist/fonts/${font}`, `${target}fonts/${font}`);
}
const licences = [];
for (const [name, version] of Object.entries(dependencies)) {
  const file = (await readdir(packages + name)).find((each) => /^licen[cs]e/i.test(each));
  licences.push(`${name} ${version}\n\n${await readFile(`${packages}${name}/${file}`, "utf8")}`);
}
await writeFile(`${target}LICENSES`, licences.join(`\n${"-".repeat(100)}\n\n`));
