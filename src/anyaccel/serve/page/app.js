// SPDX-License-Identifier: Apache-2.0
// The chat page: conversations at the left, messages, and the composer.

import { ServerError, chat, models } from "./api.js";
import * as conversations from "./conversations.js";
import { button, element, save } from "./elements.js";
import { fill, messageNode } from "./messages.js";
import * as store from "./store.js";
import * as tree from "./tree.js";

const at = (id) => document.getElementById(id);
const { settings } = store;
const SAVE_MS = 1000; // between two times that an answer is kept while it comes
const MOST_FILE = 1 << 20; // bytes of an attached file
const running = new Map(); // conversation -> the AbortController of the answer that comes
const nodes = new WeakMap(); // message -> its node, where it is shown
let leaving = false; // the page is left, and the browser breaks off running answers
let files = []; // attached to the next message
let current = tree.create();

// Theme -------------------------------------------------------------------------------------------------------

function showTheme() {
  if (settings.theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = settings.theme;
  at("theme").textContent = `Theme: ${settings.theme}`;
}
at("theme").addEventListener("click", () => {
  settings.theme = { system: "light", light: "dark", dark: "system" }[settings.theme] ?? "system";
  store.saveSettings();
  showTheme();
});

// Settings ----------------------------------------------------------------------------------------------------

function showSettings() {
  for (const name of store.NUMBERS) at(name).value = settings[name] ?? "";
  at("key").value = store.getKey();
  at("system").value = current.system;
  at("tools").value = settings.tools;
}
for (const name of store.NUMBERS) {
  at(name).addEventListener("change", (event) => {
    const value = event.target.valueAsNumber; // NaN: there is none
    settings[name] = Number.isFinite(value) ? value : null;
    store.saveSettings();
    showSettings();
  });
}
at("system").addEventListener("input", (event) => {
  current.system = event.target.value;
  if (current.messages.length) keep(current);
});
at("tools").addEventListener("change", (event) => {
  const text = event.target.value;
  let problem = "";
  try {
    store.tools(text);
    settings.tools = text;
    store.saveSettings();
  } catch (error) {
    problem = `This is no JSON: ${error.message}. The functions are as they were before.`;
  }
  at("tools-wrong").textContent = problem;
  at("tools-wrong").hidden = !problem;
  event.target.setAttribute("aria-invalid", String(Boolean(problem)));
});
at("key").addEventListener("change", (event) => {
  store.setKey(event.target.value.trim());
  showModels();
});
function openSettings(open) {
  at("settings").hidden = !open;
  at("open-settings").setAttribute("aria-expanded", String(open));
}
at("open-settings").addEventListener("click", () => openSettings(at("settings").hidden));

async function showModels() {
  try {
    const found = await models();
    const name = ({ id, status }) => (status?.value === "unloaded" ? `${id} (not loaded)` : id);
    at("model").replaceChildren(...found.map((each) => element("option", { value: each.id }, name(each))));
    at("model").value = found.some((each) => each.id === settings.model) ? settings.model : found[0].id;
    at("model").disabled = false;
  } catch (error) {
    const isLocked = error instanceof ServerError && error.status === 401;
    at("model").replaceChildren(element("option", { value: "" }, isLocked ? "API key needed" : "no server"));
    at("model").disabled = true;
    if (!isLocked) return;
    openSettings(true);
    at("key").focus();
  }
}
at("model").addEventListener("change", (event) => {
  settings.model = event.target.value;
  store.saveSettings();
});

// Conversations -----------------------------------------------------------------------------------------------

async function keep(conversation) {
  await conversations.keep(conversation);
  showNotice();
}

/** Show that something is in this tab alone, and what to do about it. */
function showNotice() {
  at("notice").hidden = !conversations.isUnsaved();
  if (!conversations.isUnsaved()) return;
  const words = `${conversations.problem()} Delete conversations that you do not need, or download all of them.`;
  at("notice").replaceChildren(element("span", {}, words), button("Download all", download));
}

const download = () => save("conversations.json", JSON.stringify(conversations.all(), null, 1), "application/json");
const fileName = () => (current.title || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60);
at("download").addEventListener("click", download);
at("as-markdown").addEventListener("click", () => save(`${fileName()}.md`, tree.asMarkdown(current), "text/markdown"));
at("as-json").addEventListener("click", () => save(`${fileName()}.json`, JSON.stringify(current, null, 1), "application/json"));
at("import").addEventListener("click", async () => {
  const [file] = await pickFiles({ accept: ".json,application/json" });
  if (!file) return;
  let count = 0;
  let others = 0;
  try {
    [count, others] = await conversations.take(await file.text());
  } catch {
    count = 0; // no JSON
  }
  const rest = others ? `, ${others} left out: not in the form that this page exports` : "";
  say(count ? `Imported from ${file.name}: ${count}${rest}` : `${file.name} has no conversations of this page`, !count || others > 0);
  showList();
});
at("export").addEventListener("click", (event) => {
  if (event.target.tagName === "BUTTON") at("export").open = false;
});
document.addEventListener("click", (event) => {
  if (!at("export").contains(event.target)) at("export").open = false;
});

/** Tell of something that has happened, also to those who hear the page. */
function say(text, isWrong = false) {
  at("said").textContent = text;
  if (isWrong) alert(text);
}

conversations.watch((conversation, isRemoved) => {
  if (isRemoved) running.get(conversation)?.abort();
  if (isRemoved && conversation === current) choose(conversations.all()[0] ?? tree.create());
  else if (conversation === current && !document.querySelector(".edit") && !running.has(current)) show(true);
  else showList();
});
window.addEventListener("storage", (event) => {
  if (event.key !== store.SETTINGS) return;
  store.readAgain();
  showTheme();
  showSettings();
});

function openSide(open) {
  at("side").classList.toggle("open", open);
  at("shade").hidden = !open;
  if (open) at("close-side").focus();
}
at("open-side").addEventListener("click", () => openSide(true));
at("close-side").addEventListener("click", () => openSide(false));
at("shade").addEventListener("click", () => openSide(false));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && event.shiftKey) at("text").focus();
  else if (event.key === "Escape") {
    if (at("export").open) at("export").open = false;
    else if (at("shade").hidden && !document.querySelector(".edit")) stop();
    openSide(false);
  } else if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    choose(tree.create());
  }
});

function choose(conversation) {
  current = conversation;
  openSide(false);
  show();
  at("text").focus();
}
at("new").addEventListener("click", () => choose(tree.create()));

function showList() {
  const wanted = at("search").value.trim().toLowerCase();
  const isFound = (each) =>
    !wanted ||
    each.title.toLowerCase().includes(wanted) ||
    each.messages.some((message) => message.content.toLowerCase().includes(wanted));
  const entries = conversations.all().filter(isFound).map((each) => {
    const title = each.title || "Untitled";
    const isCurrent = each === current;
    return element(
      "div",
      { class: isCurrent ? "entry current" : "entry" },
      button(title, () => choose(each), { title, "aria-current": isCurrent ? "page" : null }),
      button("✎", () => rename(each), { class: "more rename", "aria-label": `Rename ${title}` }),
      button("✕", () => forget(each), { class: "more delete", "aria-label": `Delete ${title}` }),
    );
  });
  at("list").replaceChildren(...entries);
  at("title").textContent = current.title || "New conversation";
}
at("search").addEventListener("input", showList);

function rename(conversation) {
  const title = prompt("Title", conversation.title)?.trim();
  if (!title) return;
  conversation.title = title;
  keep(conversation);
  showList();
}

async function forget(conversation) {
  if (!confirm(`Delete “${conversation.title || "Untitled"}”?`)) return;
  running.get(conversation)?.abort();
  await conversations.remove(conversation);
  showNotice();
  if (conversation === current) choose(conversations.all()[0] ?? tree.create());
  else showList();
}

// Messages ----------------------------------------------------------------------------------------------------

function show(stays = false) {
  showList();
  showSettings();
  showMessages(stays);
  showRunning();
}

function showMessages(stays = false) {
  const scroll = at("scroll");
  const top = stays && scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight >= 80 ? scroll.scrollTop : null;
  const shown = tree.path(current).map((each) => nodeOf(each));
  if (!shown.length) {
    shown.push(
      element("div", { class: "empty" }, element("h2", {}, "What can I do for you?"), "The model runs on this server alone."),
    );
  }
  at("messages").replaceChildren(...shown);
  scroll.scrollTop = top ?? scroll.scrollHeight;
}

const view = (message) => ({
  ...actions,
  conversation: current,
  comes: running.get(current)?.message === message,
  isLast: message.id === current.leaf,
  isRunning: running.has(current),
});

/** The node of a message: the same as before if it would look the same, so that what is open or selected in it stays. */
function nodeOf(message, isNew = false) {
  const seen = view(message);
  const { comes, isLast, isRunning } = seen;
  const places = tree.versions(current, message).map((each) => each.id);
  const looks = JSON.stringify([message, places, comes, isLast, isRunning, conversations.stateOf(message)]);
  const there = nodes.get(message);
  if (!isNew && there?.looks === looks && !there.classList.contains("edit")) return there;
  const node = messageNode(message, seen);
  node.looks = looks;
  nodes.set(message, node);
  return node;
}

/** End what comes in the conversation that is shown: something else is to come in its place. */
function giveUp() {
  stop();
  running.delete(current);
}

const actions = {
  /** Show a message anew in the place of its node. */
  renew(message, node) {
    const made = nodeOf(message, true);
    node.replaceWith(made);
    return made;
  },
  /** An edited message is a further branch; below one of the user's, an answer comes. */
  edit(message, content) {
    if (message.role === "user") giveUp();
    const { role, model } = message;
    const made = { role, content, ...(message.files ? { files: message.files } : {}), ...(model ? { model } : {}) };
    const added = tree.add(current, message.parent, made);
    keep(current);
    if (role === "user") generate(added);
    else show(true);
  },
  regenerate(message) {
    giveUp();
    generate(tree.path(current, message.parent).at(-1) ?? null);
  },
  answer: (message) => generate(message),
  goOn: (message) => generate(message, message),
  choose(message) {
    tree.show(current, message);
    keep(current);
    show(true);
  },
  results(message, texts) {
    let last = message;
    message.calls.forEach(({ id, name }, place) => {
      last = tree.add(current, last.id, { role: "tool", call: id, name, content: texts[place] });
    });
    keep(current);
    generate(last);
  },
};

// Answers -----------------------------------------------------------------------------------------------------

function ask(content) {
  const made = { role: "user", content, ...(files.length ? { files } : {}) };
  const message = tree.add(current, current.leaf, made);
  current.title ||= (content.trim() || files[0].name).split("\n")[0].slice(0, 60);
  files = [];
  showFiles();
  keep(current);
  generate(message);
}

function stop() {
  running.get(current)?.abort();
}
at("stop").addEventListener("click", stop);

function showRunning() {
  at("send").hidden = running.has(current);
  at("stop").hidden = !running.has(current);
}

/** The page is left, which breaks off running answers. */
window.addEventListener("pagehide", () => {
  leaving = true;
  conversations.leave([...running].map(([conversation, { message }]) => [conversation, message]));
});
window.addEventListener("pageshow", (event) => {
  if (event.persisted) location.reload(); // the answers that ran when it was left have been broken off
});
window.addEventListener("beforeunload", (event) => {
  if (conversations.isUnsaved()) event.preventDefault(); // the browser asks whether to leave
});

/** What to ask for an answer below a message; or for more of it, where it is an answer itself. */
function requestBody(conversation, above, goesOn) {
  const messages = tree
    .path(conversation, above?.id ?? null)
    .filter((each) => each.content || each.calls || each.files || each.role === "tool")
    .map(tree.forRequest);
  if (conversation.system.trim()) messages.unshift({ role: "system", content: conversation.system });
  const body = { messages, ...store.numbers() };
  const tools = store.tools();
  if (tools.length) body.tools = tools;
  if (goesOn) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  if (at("model").value) body.model = at("model").value;
  return body;
}

/** An error as text for the user. */
function errorText(error) {
  if (!(error instanceof ServerError)) return `The server cannot be reached (${error.message}).`;
  if (error.code !== "context_length_exceeded") return error.message;
  return "This conversation is longer than the model can read. Begin a new one, or edit an earlier message.";
}

function isSelected(node) {
  const selection = getSelection();
  return !selection.isCollapsed && selection.containsNode(node, true);
}

/** Calls come in pieces: the first has the name, and all have some of the arguments. */
function addCalls(message, deltas) {
  message.calls ??= [];
  for (const { index = message.calls.length, id, function: part } of deltas) {
    message.calls[index] ??= { id, name: "", text: "" };
    message.calls[index].name += part?.name ?? "";
    message.calls[index].text += part?.arguments ?? "";
  }
}

/** Let an answer come below a message; or `more` of an answer that has ended early. */
async function generate(above, more = null) {
  const conversation = current;
  const controller = new AbortController();
  const body = requestBody(conversation, above, more !== null);
  const fresh = { role: "assistant", content: "", reasoning: "", model: body.model };
  const message = more ?? tree.add(conversation, above?.id ?? null, fresh);
  delete message.finish;
  message.coming = Date.now();
  controller.message = message;
  running.set(conversation, controller);
  show();
  say("The answer comes");
  const scroll = at("scroll");
  const follows = () => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
  const isMine = () => running.get(conversation) === controller;
  const start = performance.now();
  let first = 0;
  let pieces = 0;
  let usage = null;
  let drawn = 0;
  const draw = () => {
    drawn = 0;
    if (!isMine() || conversation !== current) return;
    const below = follows();
    const node = nodes.get(message);
    if (isSelected(node)) return; // drawing its end anew would take the selection away
    fill(node.querySelector(".body"), message, view(message));
    if (pieces > 1) {
      const rate = (1000 * (pieces - 1)) / (performance.now() - first);
      node.querySelector(".under").replaceChildren(element("span", { class: "speed" }, `${rate.toFixed(1)} tokens/s`));
    }
    if (below) scroll.scrollTop = scroll.scrollHeight;
  };
  const saving = setInterval(() => {
    if (!isMine() || !conversations.all().includes(conversation)) return;
    message.saved = message.coming = Date.now();
    keep(conversation);
  }, SAVE_MS);
  try {
    for await (const part of chat(body, controller.signal)) {
      if (part.content || part.reasoning || part.calls.length) {
        first ||= performance.now();
        pieces += 1;
        message.content += part.content;
        message.reasoning = (message.reasoning ?? "") + part.reasoning;
        if (part.calls.length) addCalls(message, part.calls);
        if (message.reasoning && (part.content || part.calls.length)) message.thought ??= (performance.now() - first) / 1000;
        drawn ||= requestAnimationFrame(draw);
      }
      message.finish = part.finish ?? message.finish;
      usage = part.usage ?? usage;
    }
  } catch (error) {
    if (controller.signal.aborted) message.finish = "stopped";
    else message.wrong = errorText(error);
  }
  clearInterval(saving);
  if (leaving) return;
  delete message.coming;
  message.saved = Date.now();
  const seconds = (performance.now() - first) / 1000;
  const tokens = usage?.completion_tokens ?? pieces;
  if (first) {
    message.stats = { tokens, rate: tokens > 1 ? (tokens - 1) / seconds : 0, first: (first - start) / 1000 };
  }
  if (!message.reasoning) delete message.reasoning;
  if (message.finish !== "tool_calls") delete message.calls; // they have not come as a whole
  const isEmpty = !message.content && !message.reasoning && !message.wrong && !message.calls;
  if (isMine()) running.delete(conversation);
  if (isEmpty && message.finish === "stopped") {
    const { leaf } = conversation;
    tree.drop(conversation, message);
    if (leaf !== message.id) conversation.leaf = leaf; // another answer has taken its place
  }
  if (conversations.all().includes(conversation)) await keep(conversation); // else it was deleted
  if (conversation !== current) return;
  say(message.wrong ?? (message.finish === "stopped" ? "The answer was stopped" : "The answer is complete"));
  if (running.has(conversation) || !tree.path(conversation).includes(message)) {
    if (!running.has(conversation)) show();
    return;
  }
  showList();
  showRunning();
  while (isSelected(nodes.get(message))) {
    await new Promise((done) => document.addEventListener("selectionchange", done, { once: true }));
  }
  if (conversation !== current || running.has(conversation) || !tree.path(conversation).includes(message)) return;
  const below = follows();
  // The rest stays as it is: another message, or a setting, may be edited at this moment.
  actions.renew(message, nodes.get(message));
  if (below) scroll.scrollTop = scroll.scrollHeight;
}

// The composer ------------------------------------------------------------------------------------------------

const text = at("text");
function fit() {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}
text.addEventListener("input", fit);
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("composer").requestSubmit();
  }
});
at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if ((!text.value.trim() && !files.length) || running.has(current)) return;
  const content = text.value;
  text.value = "";
  fit();
  ask(content);
});

/** Files that somebody chooses. */
function pickFiles(attributes) {
  const field = element("input", { type: "file", ...attributes });
  return new Promise((done) => {
    field.addEventListener("change", () => done([...field.files]));
    field.addEventListener("cancel", () => done([]));
    field.click();
  });
}

/** Attach files that are text. */
async function attach(chosen) {
  const refused = [];
  for (const file of chosen) {
    try {
      if (file.size > MOST_FILE) throw new Error("it has more than a megabyte");
      const read = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (read.includes("\0")) throw new Error("it is no text");
      files.push({ name: file.name, text: read });
    } catch (error) {
      refused.push(`${file.name}: ${error instanceof TypeError ? "it is no text in UTF-8" : error.message}`);
    }
  }
  showFiles();
  if (refused.length) say(`Not attached: ${refused.join("; ")}`, true);
  text.focus();
}

function showFiles() {
  const shown = files.map((file) => {
    const away = () => {
      files = files.filter((each) => each !== file);
      showFiles();
    };
    return element("span", {}, file.name, button("✕", away, { "aria-label": `Remove ${file.name}` }));
  });
  at("files").replaceChildren(...shown);
}
at("attach").addEventListener("click", async () => attach(await pickFiles({ multiple: true })));
const dropped = (event) => [...(event.dataTransfer ?? event.clipboardData).files];
const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
document.addEventListener("dragover", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  at("composer").classList.add("over");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) at("composer").classList.remove("over");
});
document.addEventListener("drop", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  at("composer").classList.remove("over");
  attach(dropped(event));
});
text.addEventListener("paste", (event) => {
  if (!dropped(event).length) return;
  event.preventDefault();
  attach(dropped(event));
});

showTheme();
showModels();
await conversations.load();
current = conversations.all()[0] ?? current;
show();
showNotice();
