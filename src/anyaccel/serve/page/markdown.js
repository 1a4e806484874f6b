// SPDX-License-Identifier: Apache-2.0
// Markdown as nodes of the page. What a model writes is never read as HTML: text becomes text nodes, and the only
// addresses that become links are those of http, https and mailto.

/** An element with children. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value != null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

// What is inside of a line, the longest marks first. Each has one group for its text, a link two.
const INSIDE = new RegExp(
  [
    "(?<formula>\\\\\\(.+?\\\\\\)|\\\\\\[.+?\\\\\\]|\\$\\$.+?\\$\\$)",
    "(`+)(?<code>[^`]|[^`].*?[^`])\\2(?!`)",
    "\\*\\*(?<strong>[^\\s*](?:.*?[^\\s])?)\\*\\*",
    "(?<![\\w_])__(?<strong2>[^\\s_](?:.*?[^\\s])?)__(?![\\w_])",
    "~~(?<del>[^\\s~](?:.*?[^\\s])?)~~",
    "\\*(?<em>[^\\s*](?:[^*]*?[^\\s*])?)\\*",
    "(?<![\\w_])_(?<em2>[^\\s_](?:[^_]*?[^\\s_])?)_(?![\\w_])",
    "!?\\[(?<label>[^\\]]*)\\]\\((?<target>[^()\\s]+(?:\\([^()\\s]*\\))?[^()\\s]*)(?:\\s+\"[^\"]*\")?\\)",
    "(?<bare>https?://[^\\s<>()]*[^\\s<>().,;:!?'\"])",
    "\\\\(?<plain>[!-/:-@\\[-`{-~])",
  ].join("|"),
  "su",
);
const NAMES = { strong: "strong", strong2: "strong", del: "del", em: "em", em2: "em" };

function link(target, label) {
  let address;
  try {
    address = new URL(target);
  } catch {
    return [document.createTextNode(`${label} (${target})`)];
  }
  if (!["http:", "https:", "mailto:"].includes(address.protocol)) return [document.createTextNode(label)];
  return [element("a", { href: address.href, target: "_blank", rel: "noopener noreferrer" }, label)];
}

/** A text of a paragraph as nodes. */
function inline(text, depth = 0) {
  const nodes = [];
  while (text) {
    // A text of this length is none that a person marks up, and looking for marks in it would take long.
    const found = depth < 8 && text.length < 20000 ? INSIDE.exec(text) : null;
    if (!found) {
      nodes.push(document.createTextNode(text));
      break;
    }
    if (found.index) nodes.push(document.createTextNode(text.slice(0, found.index)));
    const parts = found.groups;
    const name = Object.keys(NAMES).find((each) => parts[each] !== undefined);
    if (parts.formula !== undefined) nodes.push(document.createTextNode(parts.formula));
    else if (parts.code !== undefined) nodes.push(element("code", {}, parts.code.trim() || parts.code));
    else if (name) nodes.push(element(NAMES[name], {}, ...inline(parts[name], depth + 1)));
    else if (parts.target !== undefined) nodes.push(...link(parts.target, parts.label || parts.target));
    else if (parts.bare !== undefined) nodes.push(...link(parts.bare, parts.bare));
    else nodes.push(document.createTextNode(parts.plain));
    text = text.slice(found.index + found[0].length);
  }
  return nodes;
}

/** Lines with breaks where they end with two spaces. */
function paragraph(lines) {
  const nodes = [];
  lines.forEach((line, place) => {
    if (place) nodes.push(/ {2}$|\\$/.test(lines[place - 1]) ? element("br") : document.createTextNode("\n"));
    nodes.push(line.replace(/(?: {2,}|\\)$/, "").trim());
  });
  // Marks may go over several lines, so that these are joined before they are looked for.
  const joined = [];
  let text = "";
  for (const node of nodes) {
    if (typeof node === "string") text += node;
    else if (node.nodeType === Node.TEXT_NODE) text += node.data;
    else {
      joined.push(...inline(text), node);
      text = "";
    }
  }
  return [...joined, ...inline(text)];
}

/** A button that copies a text, also where the page has come without HTTPS and browsers give it no clipboard. */
export function copyButton(text) {
  const made = element("button", { type: "button", class: "quiet" }, "Copy");
  made.addEventListener("click", async () => {
    if (navigator.clipboard) await navigator.clipboard.writeText(text());
    else {
      const field = element("textarea", { class: "unseen" });
      field.value = text();
      document.body.append(field);
      field.select();
      document.execCommand("copy");
      field.remove();
    }
    made.textContent = "Copied";
    setTimeout(() => (made.textContent = "Copy"), 1500);
  });
  return made;
}

function codeBlock(language, text) {
  const head = element("div", {}, element("span", {}, language || "text"), copyButton(() => text));
  return element("div", { class: "code" }, head, element("pre", {}, element("code", {}, text)));
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const CLOSING = /(?:^|[ \t])#{1,64}$/; // of a heading; the mark of C# is none
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((each) => each.trim());

/** Nodes for a whole text. */
export function markdown(text, depth = 0) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const nodes = [];
  let place = 0;
  const begins = (line, next) =>
    FENCE.test(line) || HEADING.test(line) || RULE.test(line) || ITEM.test(line) || QUOTE.test(line) ||
    (line.includes("|") && next !== undefined && next.includes("-") && DIVIDER.test(next));
  while (place < lines.length) {
    const line = lines[place];
    let found;
    if (!line.trim()) {
      place += 1;
    } else if ((found = FENCE.exec(line))) {
      const [, mark, language] = found;
      const inside = [];
      place += 1;
      while (place < lines.length && !(lines[place].trim().startsWith(mark) && !lines[place].trim().replaceAll(mark[0], ""))) {
        inside.push(lines[place++]);
      }
      place += 1;
      nodes.push(codeBlock(language, inside.join("\n")));
    } else if ((found = HEADING.exec(line))) {
      const title = found[2].trimEnd().replace(CLOSING, "").trimEnd();
      nodes.push(element(`h${found[1].length}`, {}, ...inline(title)));
      place += 1;
    } else if (RULE.test(line)) {
      nodes.push(element("hr"));
      place += 1;
    } else if (QUOTE.test(line) && depth < 6) {
      const inside = [];
      while (place < lines.length && QUOTE.test(lines[place])) inside.push(lines[place++].replace(QUOTE, ""));
      nodes.push(element("blockquote", {}, ...markdown(inside.join("\n"), depth + 1)));
    } else if ((found = ITEM.exec(line)) && depth < 6) {
      const ordered = /\d/.test(found[2]);
      const list = element(ordered ? "ol" : "ul", ordered ? { start: parseInt(found[2], 10) } : {});
      const indent = found[1].length;
      while (place < lines.length) {
        const item = ITEM.exec(lines[place]);
        if (!item || item[1].length > indent + 1 || item[1].length < indent || /\d/.test(item[2]) !== ordered) break;
        const inside = [item[3]];
        const width = item[1].length + item[2].length + 1;
        place += 1;
        while (place < lines.length) {
          const more = lines[place];
          const isIndented = more.search(/\S/) >= Math.min(width, indent + 2);
          if (!more.trim()) {
            const next = lines[place + 1];
            if (next === undefined || !(next.search(/\S/) >= Math.min(width, indent + 2))) break;
          } else if (!isIndented && (begins(more, lines[place + 1]) || !lines[place - 1].trim())) break;
          inside.push(isIndented ? more.slice(Math.min(width, more.search(/\S/))) : more);
          place += 1;
        }
        const made = markdown(inside.join("\n"), depth + 1);
        const tight = made.length && made[0].nodeName === "P" ? [...made.shift().childNodes, ...made] : made;
        list.append(element("li", {}, ...tight));
        if (place < lines.length && !lines[place].trim() && ITEM.test(lines[place + 1] ?? "")) place += 1;
      }
      nodes.push(list);
    } else if (line.includes("|") && lines[place + 1]?.includes("-") && DIVIDER.test(lines[place + 1])) {
      const row = (name, each) => element("tr", {}, ...cells(each).map((cell) => element(name, {}, ...inline(cell))));
      const table = element("table", {}, element("thead", {}, row("th", line)));
      const body = element("tbody");
      place += 2;
      while (place < lines.length && lines[place].includes("|")) body.append(row("td", lines[place++]));
      table.append(body);
      nodes.push(table);
    } else {
      const inside = [line];
      place += 1;
      while (place < lines.length && lines[place].trim() && !begins(lines[place], lines[place + 1])) inside.push(lines[place++]);
      nodes.push(element("p", {}, ...paragraph(inside)));
    }
  }
  return nodes;
}
