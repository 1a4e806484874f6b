// SPDX-License-Identifier: Apache-2.0
// The chat page: conversations at the left, messages, and the composer.

import { ServerError, chat, models } from "./api.js";
import * as conversations from "./conversations.js";
import { copyButton, element, markdown } from "./markdown.js";
import * as store from "./store.js";

const at = (id) => document.getElementById(id);
const { settings } = store;
const SAVE_MS = 1000; // between two times that an answer is kept while it comes
const running = new Map(); // conversation -> the AbortController of the answer that comes
const nodes = new WeakMap(); // message -> its node, where it is shown
let leaving = false; // the page is left, and the browser breaks off running answers
let current = conversations.all()[0] ?? conversations.create();

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
at("key").addEventListener("change", (event) => {
  store.setKey(event.target.value.trim());
  showModels();
});
at("open-settings").addEventListener("click", () => {
  const hidden = at("settings").toggleAttribute("hidden");
  at("open-settings").setAttribute("aria-expanded", String(!hidden));
});

async function showModels() {
  try {
    const found = await models();
    at("model").replaceChildren(...found.map((each) => element("option", { value: each.id }, each.id)));
    at("model").value = found.some((each) => each.id === settings.model) ? settings.model : found[0].id;
    at("model").disabled = false;
  } catch (error) {
    const text = error instanceof ServerError && error.status === 401 ? "API key needed" : "no server";
    at("model").replaceChildren(element("option", { value: "" }, text));
    at("model").disabled = true;
    if (error instanceof ServerError && error.status === 401) {
      at("settings").hidden = false;
      at("open-settings").setAttribute("aria-expanded", "true");
      at("key").focus();
    }
  }
}
at("model").addEventListener("change", (event) => {
  settings.model = event.target.value;
  store.saveSettings();
});

// Conversations -----------------------------------------------------------------------------------------------

function keep(conversation) {
  const id = conversation.id;
  conversations.keep(conversation);
  showNotice();
  if (conversation.id !== id) showList(); // another tab has changed it: this is a copy now
}

/** Show that something is in this tab alone, and what to do about it. */
function showNotice() {
  at("notice").hidden = !conversations.isUnsaved();
  if (!conversations.isUnsaved()) return;
  const words = `${conversations.problem()} Delete conversations that you do not need, or download all of them.`;
  at("notice").replaceChildren(element("span", {}, words), button("Download all", download));
}

function download() {
  const url = URL.createObjectURL(new Blob([conversations.exported()], { type: "application/json" }));
  element("a", { href: url, download: "conversations.json" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
at("download").addEventListener("click", download);

conversations.watch({
  isBusy: (conversation) => running.has(conversation),
  changed(conversation, isRemoved) {
    if (isRemoved) running.get(conversation)?.abort();
    if (isRemoved && conversation === current) choose(conversations.all()[0] ?? conversations.create());
    else if (conversation === current && !document.querySelector(".edit")) show(true);
    else showList();
  },
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
}
at("open-side").addEventListener("click", () => openSide(true));
at("close-side").addEventListener("click", () => openSide(false));
at("shade").addEventListener("click", () => openSide(false));
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (at("shade").hidden && !document.querySelector(".edit")) stop();
  openSide(false);
});

function choose(conversation) {
  current = conversation;
  openSide(false);
  show();
  at("text").focus();
}
at("new").addEventListener("click", () => choose(conversations.create()));

function showList() {
  const entries = conversations.all().map((each) =>
    element(
      "div",
      { class: each === current ? "entry current" : "entry" },
      element("button", { onclick: () => choose(each), title: each.title }, each.title || "Untitled"),
      element("button", { class: "delete", "aria-label": `Delete ${each.title}`, onclick: () => forget(each) }, "✕"),
    ),
  );
  at("list").replaceChildren(...entries);
}

function forget(conversation) {
  if (!confirm(`Delete “${conversation.title || "Untitled"}”?`)) return;
  running.get(conversation)?.abort();
  conversations.remove(conversation);
  showNotice();
  if (conversation === current) choose(conversations.all()[0] ?? conversations.create());
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
  const shown = current.messages.map((message, place) => messageNode(message, place));
  if (!shown.length) {
    shown.push(
      element("div", { class: "empty" }, element("h1", {}, "What can I do for you?"), "The model runs on this server alone."),
    );
  }
  at("messages").replaceChildren(...shown);
  scroll.scrollTop = top ?? scroll.scrollHeight;
}

function button(text, action) {
  return element("button", { type: "button", onclick: action }, text);
}

function speed(message) {
  const stats = message.stats;
  const parts = stats ? [`${stats.tokens} tokens`] : [];
  if (stats?.rate) parts.push(`${stats.rate.toFixed(1)} tokens/s`);
  if (stats) parts.push(`first after ${stats.first.toFixed(2)} s`);
  const state = conversations.stateOf(message);
  if (state === "interrupted") parts.push("interrupted: the page was closed while this answer came");
  if (state === "coming") parts.push("this answer comes in another tab");
  if (message.finish === "length") parts.push("cut by the most tokens");
  if (message.finish === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

function messageNode(message, place) {
  const under = element("div", { class: "under" });
  const body = element("div", { class: "body" });
  const node = element("article", { class: `message ${message.role}`, "aria-label": message.role }, body, under);
  nodes.set(message, node);
  if (running.get(current)?.message === message) {
    fill(body, message, true);
    return node;
  }
  if (message.role === "user") {
    body.textContent = message.content;
    under.append(button("Edit", () => edit(node, place)), copyButton(() => message.content));
    const isLast = place === current.messages.length - 1;
    if (isLast && !running.has(current)) under.append(button("Answer", () => generate()));
  } else {
    fill(body, message);
    under.append(copyButton(() => message.content));
    if (place === current.messages.length - 1) under.append(button("Regenerate", () => regenerate(place)));
    under.append(element("span", { class: "speed" }, speed(message)));
    const later = () => node.isConnected && node.replaceWith(messageNode(message, place));
    if (conversations.stateOf(message) === "coming") setTimeout(later, conversations.LIVES_MS); // unless its tab keeps more of it
  }
  return node;
}

/** An answer, as far as it has come. */
function fill(body, message, waiting = false) {
  const nodes = [];
  if (message.reasoning) {
    const open = body.querySelector("details")?.open ?? (waiting && !message.content);
    const reasoning = element("details", { class: "reasoning", open }, element("summary", {}, "Reasoning"));
    reasoning.append(element("div", {}, message.reasoning.trim()));
    nodes.push(reasoning);
  }
  nodes.push(...markdown(message.content));
  if (message.wrong) nodes.push(element("div", { class: "wrong", role: "alert" }, message.wrong));
  if (waiting && !message.content) nodes.push(element("span", { class: "waiting", "aria-label": "The answer comes" }));
  body.replaceChildren(...nodes);
}

function regenerate(place) {
  stop();
  running.delete(current); // its answer is not wanted any more
  current.messages.length = place;
  generate();
}

function edit(node, place) {
  const text = element("textarea", { rows: 3, "aria-label": "Message" });
  text.value = current.messages[place].content;
  const done = (event) => {
    event.preventDefault();
    if (!text.value.trim()) return;
    stop();
    running.delete(current);
    current.messages.length = place;
    say(text.value);
  };
  // This message alone: an answer that comes is drawn into its own node meanwhile.
  const cancel = () => node.replaceWith(messageNode(current.messages[place], place));
  const buttons = element("div", { class: "under" }, button("Cancel", cancel));
  buttons.append(element("button", { type: "button", class: "primary", onclick: done }, "Send"));
  node.classList.add("edit");
  node.replaceChildren(text, buttons);
  text.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation(); // it is for this message, and not for an answer that comes
      cancel();
    }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) done(event);
  });
  text.focus();
}

// Answers -----------------------------------------------------------------------------------------------------

function say(text) {
  current.messages.push({ role: "user", content: text });
  current.title ||= text.trim().split("\n")[0].slice(0, 60);
  keep(current);
  generate();
}

function stop() {
  running.get(current)?.abort();
}
at("stop").addEventListener("click", stop);

function showRunning() {
  at("send").hidden = running.has(current);
  at("stop").hidden = !running.has(current);
}

/** The page is left, which breaks off running answers: keep them as far as they came, with a mark. */
window.addEventListener("pagehide", () => {
  leaving = true;
  for (const [conversation, { message }] of running) {
    delete message.coming;
    message.finish = "interrupted";
    conversations.keep(conversation);
  }
});
window.addEventListener("pageshow", (event) => {
  if (event.persisted) location.reload(); // the answers that ran when it was left have been broken off
});
window.addEventListener("beforeunload", (event) => {
  if (conversations.isUnsaved()) event.preventDefault(); // the browser asks whether to leave
});

function requestBody(conversation) {
  const messages = conversation.messages
    .filter((each) => each.content)
    .map(({ role, content }) => ({ role, content }));
  if (conversation.system.trim()) messages.unshift({ role: "system", content: conversation.system });
  const body = { messages, ...store.numbers() };
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

async function generate() {
  const conversation = current;
  const controller = new AbortController();
  const body = requestBody(conversation);
  const message = { role: "assistant", content: "", reasoning: "", coming: Date.now() };
  controller.message = message;
  running.set(conversation, controller);
  conversation.messages.push(message);
  show();
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
    if (isSelected(node)) return; // drawing it anew would take the selection away
    fill(node.querySelector(".body"), message, true);
    if (pieces > 1) {
      const rate = (1000 * (pieces - 1)) / (performance.now() - first);
      node.querySelector(".under").replaceChildren(element("span", { class: "speed" }, `${rate.toFixed(1)} tokens/s`));
    }
    if (below) scroll.scrollTop = scroll.scrollHeight;
  };
  const saving = setInterval(() => {
    if (!isMine()) return;
    message.coming = Date.now();
    keep(conversation);
  }, SAVE_MS);
  try {
    for await (const part of chat(body, controller.signal)) {
      if (part.content || part.reasoning) {
        first ||= performance.now();
        pieces += 1;
        message.content += part.content;
        message.reasoning += part.reasoning;
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
  const seconds = (performance.now() - first) / 1000;
  const tokens = usage?.completion_tokens ?? pieces;
  if (first) {
    message.stats = { tokens, rate: tokens > 1 ? (tokens - 1) / seconds : 0, first: (first - start) / 1000 };
  }
  if (!message.reasoning) delete message.reasoning;
  if (!isMine()) return; // another answer has taken its place
  running.delete(conversation);
  const isEmpty = !message.content && !message.reasoning && !message.wrong;
  if (isEmpty && message.finish === "stopped") conversation.messages.pop();
  if (conversations.all().includes(conversation)) keep(conversation); // else it was deleted
  if (conversation !== current) return;
  if (!conversation.messages.includes(message)) {
    show();
    return;
  }
  showList();
  showRunning();
  while (isSelected(nodes.get(message))) {
    await new Promise((done) => document.addEventListener("selectionchange", done, { once: true }));
  }
  if (conversation !== current || !conversation.messages.includes(message)) return;
  const below = follows();
  // The rest stays as it is: another message, or a setting, may be edited at this moment.
  nodes.get(message).replaceWith(messageNode(message, conversation.messages.indexOf(message)));
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
  if (!text.value.trim() || running.has(current)) return;
  const content = text.value;
  text.value = "";
  fit();
  say(content);
});

showTheme();
show();
showNotice();
showModels();
