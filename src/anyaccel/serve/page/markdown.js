// SPDX-License-Identifier: Apache-2.0
// Markdown as nodes of the page: marked reads it, and DOMPurify lets through what a text needs, so that what a model writes
// never runs and loads nothing. Highlighting and formulas come with libraries that are loaded when they are needed first.

import { copyButton, element } from "./elements.js";
import { DOMPurify, Marked } from "./vendor/text.js";

const escape = (text) => text.replace(/[&<>"']/g, (each) => `&#${each.charCodeAt(0)};`);

// Lengths have bounds, so that a text with many beginnings and no ends does not take long.
const INSIDE = /^(?:\$\$([^]{1,1000}?)\$\$|\\\[([^]{1,1000}?)\\\]|\\\(([^]{1,1000}?)\\\)|\$(?![\s$])((?:\\.|[^\\$\n]){1,1000}?)(?<!\s)\$(?!\d))/;
const BLOCK = /^ {0,3}(?:\$\$([^]{1,10000}?)\$\$|\\\[([^]{1,10000}?)\\\])[ \t]*(?:\n|$)/;

function formula(raw, text, isDisplay) {
  return { type: "formula", raw, text: text.trim(), isDisplay };
}
const showFormula = ({ text, isDisplay }) => `<span class="${isDisplay ? "formula display" : "formula"}">${escape(text)}</span>`;
const FORMULAS = [
  {
    name: "formulas",
    level: "block",
    start: (source) => source.match(/(?:^|\n) {0,3}(?:\$\$|\\\[)/)?.index,
    tokenizer(source) {
      const found = BLOCK.exec(source);
      return found ? { ...formula(found[0], found[1] ?? found[2], true), type: "formulas" } : undefined;
    },
    renderer: (token) => `<p>${showFormula(token)}</p>`,
  },
  {
    name: "formula",
    level: "inline",
    start: (source) => source.match(/\$|\\\(|\\\[/)?.index,
    tokenizer(source) {
      const found = INSIDE.exec(source);
      if (!found) return undefined;
      const display = found[1] ?? found[2];
      return formula(found[0], display ?? found[3] ?? found[4], display !== undefined);
    },
    renderer: showFormula,
  },
];

// What models write of HTML within Markdown; other tags are shown as they were written.
const PLAIN_TAG = /^<\/?(?:br|b|i|u|s|sub|sup|kbd|mark|details|summary)\s*\/?>$/i;

const marked = new Marked({
  gfm: true,
  breaks: true,
  extensions: FORMULAS,
  // A line that begins with another tag is text like any other: undefined stands for "none here", false for marked's own way.
  tokenizer: { html: (source) => (/^ {0,3}<\/?(?:details|summary)\b/i.test(source) ? false : undefined) },
  renderer: {
    html: ({ text }) => text.replace(/<[^>]*>|[&<>]/g, (each) => (PLAIN_TAG.test(each) ? each : escape(each))),
    // Loading a picture would tell its site what a model has read: its address can be followed instead.
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
    code: ({ text, lang }) => `<pre><code class="language-${escape((lang ?? "").split(/\s/)[0])}">${escape(text)}</code></pre>`,
    checkbox: ({ checked }) =>
      `<input type="checkbox" disabled aria-label="${checked ? "done" : "to do"}"${checked ? " checked" : ""}> `,
  },
});

const PLAIN = ["title", "class", "start", "align", "type", "checked", "disabled", "aria-label"];
const CLEAN = {
  RETURN_DOM_FRAGMENT: true,
  ALLOWED_TAGS: [
    ...["p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr", "pre", "table", "thead", "tbody", "tr", "th", "td"],
    ...["a", "strong", "em", "del", "b", "i", "s", "u", "mark", "code", "br", "sub", "sup", "kbd", "details", "summary", "span", "input"],
  ],
  ALLOWED_ATTR: ["href", ...PLAIN],
  ADD_URI_SAFE_ATTR: PLAIN, // the others are addresses, to which the expression below applies
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
};

/** A piece of Markdown as HTML, before it is cleaned. */
export const html = (tokens) => marked.parser(tokens);

/** The pieces of a text, each of which is shown by itself. */
export function pieces(text) {
  try {
    return marked.lexer(text.replace(/[ \t]{500,}/g, " ".repeat(500))); // looking for an end behind blanks takes long
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    return [{ type: "text", raw: text, text, escaped: false }]; // thousands of quotations within each other
  }
}

function nodesOf(token) {
  const made = DOMPurify.sanitize(html([token]), CLEAN);
  for (const link of made.querySelectorAll("a")) {
    if (link.href) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  }
  for (const pre of made.querySelectorAll("pre")) {
    const code = pre.querySelector("code");
    pre.replaceWith(codeBlock(code.className.replace("language-", ""), code.textContent));
  }
  for (const table of made.querySelectorAll("table")) {
    const around = element("div", { class: "table", role: "group", "aria-label": "Table", tabindex: "0" });
    table.replaceWith(around);
    around.append(table);
  }
  for (const each of made.querySelectorAll(".formula")) showMath(each);
  return [...made.childNodes];
}

export function codeBlock(language, text) {
  const code = element("code", {}, text);
  highlight(code, language, text);
  const head = element("div", {}, element("span", {}, language || "text"), copyButton(() => text));
  return element("div", { class: "code" }, head, element("pre", { tabindex: "0" }, code));
}

let highlighter = null;
async function highlight(code, language, text) {
  if (!language || text.length > 100_000) return;
  highlighter ??= (await import("./vendor/highlight.js")).default;
  if (!highlighter.getLanguage(language)) return;
  const { value } = highlighter.highlight(text, { language, ignoreIllegals: true });
  code.replaceChildren(DOMPurify.sanitize(value, CLEAN));
}

let katex = null;
async function showMath(node) {
  if (!katex) {
    katex = import("./vendor/katex.js");
    document.head.append(element("link", { rel: "stylesheet", href: "page/vendor/katex.css" }));
  }
  const { default: drawing } = await katex;
  const displayMode = node.classList.contains("display");
  drawing.render(node.textContent, node, { displayMode, throwOnError: false, maxExpand: 500, maxSize: 30 });
  if (displayMode) node.tabIndex = 0; // it scrolls where it is wider than the page
}

/** Show a text in a node. What is there already of it stays, so that a selection in it does, and only the end is drawn anew. */
export function draw(node, text) {
  const shown = node.pieces ?? [];
  const wanted = pieces(text).filter((token) => token.type !== "space");
  let same = 0;
  while (same < shown.length && same < wanted.length && shown[same].raw === wanted[same].raw) same += 1;
  for (const { nodes } of shown.splice(same)) for (const each of nodes) each.remove();
  for (const token of wanted.slice(same)) {
    const nodes = nodesOf(token);
    node.append(...nodes);
    shown.push({ raw: token.raw, nodes });
  }
  node.pieces = shown;
}
