// SPDX-License-Identifier: Apache-2.0
// A conversation is a tree of messages: an edit, or another answer, is a further branch. One branch is shown, up to `leaf`.

export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function create() {
  return { id: newId(), title: "", system: "", messages: [], leaf: null, changed: Date.now() };
}

const isText = (value) => typeof value === "string";
const isNumber = (value) => typeof value === "number";
const isNamedText = (value) => isText(value?.name) && isText(value.text);
const areNamedTexts = (value) => Array.isArray(value) && value.every(isNamedText);
const ROLES = ["user", "assistant", "tool"];
// What a message may have beside its role and content: what draws and sends it relies on these types.
const FIELDS = {
  ...Object.fromEntries(["reasoning", "wrong", "model", "finish", "call", "name"].map((name) => [name, isText])),
  files: areNamedTexts,
  calls: areNamedTexts,
  thought: isNumber,
  stats: (value) => isNumber(value.tokens) && isNumber(value.first) && isNumber(value.rate ?? 0),
};
const isMessage = (value) =>
  ROLES.includes(value?.role) &&
  isText(value.content) &&
  Object.entries(FIELDS).every(([name, isRight]) => (value[name] ?? null) === null || isRight(value[name]));

/**
 * What the browser or a file has, as a conversation of this page; null where it is none.
 *
 * Earlier versions of the page had a list of messages without branches.
 */
export function understood(value) {
  if (!isText(value?.id) || !Array.isArray(value.messages) || !value.messages.every(isMessage)) return null;
  const { changed } = value;
  const made = { ...value, title: String(value.title ?? ""), system: String(value.system ?? ""), changed: Number(changed) || 0 };
  delete made.revision;
  if (!made.messages.every((each) => isText(each.id))) {
    let parent = null;
    made.messages = made.messages.map((each, place) => {
      const message = { ...each, id: `${made.id}-${place}`, parent, at: made.changed };
      delete message.coming;
      parent = message.id;
      return message;
    });
    made.leaf = parent;
  }
  const ids = new Set(made.messages.map((each) => each.id));
  // A parent that is missing, or comes later, would leave messages that no branch leads to, or a circle.
  const seen = new Set();
  for (const each of made.messages) {
    if (!seen.has(each.parent)) each.parent = null;
    seen.add(each.id);
  }
  made.leaf = latest(made, ids.has(made.leaf) ? made.leaf : null);
  return made;
}

const find = (conversation, id) => conversation.messages.find((each) => each.id === id);

/** The messages of the branch that is shown. */
export function path(conversation, leaf = conversation.leaf) {
  const found = [];
  for (let each = find(conversation, leaf); each; each = find(conversation, each.parent)) found.unshift(each);
  return found;
}

/** The messages that stand at the same place, in the order in which they came. */
export const versions = (conversation, message) => conversation.messages.filter((each) => each.parent === message.parent);

/** The end of the newest branch below a message, or of all. */
function latest(conversation, id) {
  let end = id;
  for (;;) {
    const below = conversation.messages.findLast((each) => each.parent === end);
    if (!below) return end;
    end = below.id;
  }
}

/** Add a message below another one (null: as a first one), and show its branch. */
export function add(conversation, parent, message) {
  const made = { id: newId(), parent, at: Date.now(), ...message };
  conversation.messages.push(made);
  conversation.leaf = made.id;
  return made;
}

/** Take a message without any below it away. */
export function drop(conversation, message) {
  conversation.messages = conversation.messages.filter((each) => each !== message);
  conversation.leaf = message.parent;
}

/** Show the branch with a message. */
export function show(conversation, message) {
  conversation.leaf = latest(conversation, message.id);
}

/**
 * Take in what another tab has made of the same conversation.
 *
 * Messages of both are kept, and of the same message the one that was changed later. So nothing is lost, whoever saves last.
 */
export function merge(mine, theirs) {
  for (const each of theirs.messages) {
    const own = find(mine, each.id);
    if (!own) mine.messages.push(each);
    else if ((each.saved ?? each.at) > (own.saved ?? own.at)) {
      for (const name of Object.keys(own)) delete own[name];
      Object.assign(own, each);
    }
  }
  if (theirs.changed > mine.changed) {
    Object.assign(mine, { title: theirs.title, system: theirs.system, changed: theirs.changed });
  }
  mine.leaf = latest(mine, mine.leaf);
}

/** What is kept of it: an answer without anything yet is not. */
export function kept(conversation) {
  const isEmpty = (each) => each.role === "assistant" && !each.content && !each.reasoning && !each.wrong && !each.calls;
  const empty = new Set(conversation.messages.filter(isEmpty).map((each) => each.id));
  const messages = conversation.messages.filter((each) => !empty.has(each.id));
  const leaf = empty.has(conversation.leaf) ? (find(conversation, conversation.leaf).parent ?? null) : conversation.leaf;
  return structuredClone({ ...conversation, messages, leaf });
}

/** What a request says of a message. */
export function forRequest({ role, content, files = [], calls, call }) {
  if (role === "tool") return { role, content, tool_call_id: call };
  const texts = files.map(({ name, text }) => `File: ${name}\n\n${text}`);
  const said = { role, content: [...texts, content].filter(Boolean).join("\n\n") };
  if (calls) {
    said.tool_calls = calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
  }
  return said;
}

/** The branch that is shown, as Markdown. */
export function asMarkdown(conversation) {
  const names = { user: "You", assistant: "Answer", tool: "Result" };
  const parts = [`# ${conversation.title || "Conversation"}`];
  if (conversation.system.trim()) parts.push(`> ${conversation.system.trim().replaceAll("\n", "\n> ")}`);
  for (const each of path(conversation)) {
    parts.push(`## ${names[each.role] ?? each.role}`);
    for (const { name, text } of each.files ?? []) parts.push(`**${name}**`, fenced(text));
    if (each.reasoning?.trim()) parts.push(`<details><summary>Reasoning</summary>\n\n${each.reasoning.trim()}\n\n</details>`);
    if (each.content.trim()) parts.push(each.role === "tool" ? fenced(each.content) : each.content.trim());
    for (const { name, text } of each.calls ?? []) parts.push(`Call of \`${name}\`:`, fenced(text, "json"));
  }
  return `${parts.join("\n\n")}\n`;
}

function fenced(text, language = "") {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((each) => each.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text.replace(/\n$/, "")}\n${fence}`;
}
