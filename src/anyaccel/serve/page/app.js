// SPDX-License-Identifier: Apache-2.0
// The chat page: conversations at the left, messages, and what writes them.

import { Refused, chat, models } from "./api.js";
import { copyButton, element, markdown } from "./markdown.js";
import * as store from "./store.js";

const at = (id) => document.getElementById(id);
const { settings } = store;
let current = store.conversations[0] ?? store.create();
let running = null; // the AbortController of the answer that comes, and its conversation

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
  if (current.messages.length) store.keep(current);
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
    const text = error instanceof Refused && error.status === 401 ? "API key needed" : "no server";
    at("model").replaceChildren(element("option", { value: "" }, text));
    at("model").disabled = true;
    if (error instanceof Refused && error.status === 401) {
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

function openSide(open) {
  at("side").classList.toggle("open", open);
  at("shade").hidden = !open;
}
at("open-side").addEventListener("click", () => openSide(true));
at("close-side").addEventListener("click", () => openSide(false));
at("shade").addEventListener("click", () => openSide(false));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") openSide(false);
});

function choose(conversation) {
  stop();
  current = conversation;
  openSide(false);
  show();
  at("text").focus();
}
at("new").addEventListener("click", () => choose(store.create()));

function showList() {
  const entries = store.conversations.map((each) =>
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
  store.remove(conversation);
  if (conversation === current) choose(store.conversations[0] ?? store.create());
  else showList();
}

// Messages ----------------------------------------------------------------------------------------------------

function show() {
  showList();
  showSettings();
  showMessages();
}

function showMessages() {
  const shown = current.messages.map((message, place) => messageNode(message, place));
  if (!shown.length) {
    shown.push(
      element("div", { class: "empty" }, element("h1", {}, "What can I do for you?"), "The model runs on this server alone."),
    );
  }
  at("messages").replaceChildren(...shown);
  at("scroll").scrollTop = at("scroll").scrollHeight;
}

function button(text, action) {
  return element("button", { type: "button", onclick: action }, text);
}

function speed(message) {
  const told = message.stats;
  if (!told) return "";
  const parts = [`${told.tokens} tokens`];
  if (told.rate) parts.push(`${told.rate.toFixed(1)} tokens/s`);
  parts.push(`first after ${told.first.toFixed(2)} s`);
  if (message.finish === "length") parts.push("cut by the most tokens");
  if (message.finish === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

function messageNode(message, place) {
  const under = element("div", { class: "under" });
  const body = element("div", { class: "body" });
  const node = element("article", { class: `message ${message.role}`, "aria-label": message.role }, body, under);
  if (message.role === "user") {
    body.textContent = message.content;
    under.append(button("Edit", () => edit(node, place)), copyButton(() => message.content));
  } else {
    fill(body, message);
    under.append(copyButton(() => message.content));
    if (place === current.messages.length - 1) under.append(button("Regenerate", () => again(place)));
    under.append(element("span", { class: "speed" }, speed(message)));
  }
  return node;
}

/** An answer, as far as it has come. */
function fill(body, message, waiting = false) {
  const nodes = [];
  if (message.thoughts) {
    const open = body.querySelector("details")?.open ?? (waiting && !message.content);
    const thoughts = element("details", { class: "thoughts", open }, element("summary", {}, "Thoughts"));
    thoughts.append(element("div", {}, message.thoughts.trim()));
    nodes.push(thoughts);
  }
  nodes.push(...markdown(message.content));
  if (message.wrong) nodes.push(element("div", { class: "wrong", role: "alert" }, message.wrong));
  if (waiting && !message.content) nodes.push(element("span", { class: "waiting", "aria-label": "The answer comes" }));
  body.replaceChildren(...nodes);
}

function again(place) {
  stop();
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
    if (event.key === "Escape") cancel();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) done(event);
  });
  text.focus();
}

// Answers -----------------------------------------------------------------------------------------------------

function say(text) {
  current.messages.push({ role: "user", content: text });
  current.title ||= text.trim().split("\n")[0].slice(0, 60);
  store.keep(current);
  generate();
}

function stop() {
  running?.abort();
}
at("stop").addEventListener("click", stop);

function showRunning(is) {
  at("send").hidden = is;
  at("stop").hidden = !is;
}

function asked(conversation) {
  const messages = conversation.messages
    .filter((each) => each.content)
    .map(({ role, content }) => ({ role, content }));
  if (conversation.system.trim()) messages.unshift({ role: "system", content: conversation.system });
  const body = { messages, ...store.numbers() };
  if (at("model").value) body.model = at("model").value;
  return body;
}

async function generate() {
  const conversation = current;
  const controller = new AbortController();
  running = controller;
  const body = asked(conversation);
  const message = { role: "assistant", content: "", thoughts: "" };
  conversation.messages.push(message);
  show();
  showRunning(true);
  const scroll = at("scroll");
  const node = at("messages").lastElementChild;
  const place = node.querySelector(".body");
  const under = node.querySelector(".under");
  fill(place, message, true);
  under.replaceChildren();
  const start = performance.now();
  let first = 0;
  let pieces = 0;
  let usage = null;
  let drawn = 0;
  const draw = () => {
    drawn = 0;
    if (running !== controller) return;
    const follows = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
    fill(place, message, true);
    if (pieces > 1) {
      const rate = (1000 * (pieces - 1)) / (performance.now() - first);
      under.replaceChildren(element("span", { class: "speed" }, `${rate.toFixed(1)} tokens/s`));
    }
    if (follows) scroll.scrollTop = scroll.scrollHeight;
  };
  try {
    for await (const part of chat(body, controller.signal)) {
      if (part.content || part.thoughts) {
        first ||= performance.now();
        pieces += 1;
        message.content += part.content;
        message.thoughts += part.thoughts;
        drawn ||= requestAnimationFrame(draw);
      }
      message.finish = part.finish ?? message.finish;
      usage = part.usage ?? usage;
    }
  } catch (error) {
    if (controller.signal.aborted) message.finish = "stopped";
    else message.wrong = error instanceof Refused ? error.message : `The server cannot be reached (${error.message}).`;
  }
  const seconds = (performance.now() - first) / 1000;
  const tokens = usage?.completion_tokens ?? pieces;
  if (first) {
    message.stats = { tokens, rate: tokens > 1 ? (tokens - 1) / seconds : 0, first: (first - start) / 1000 };
  }
  if (!message.thoughts) delete message.thoughts;
  if (conversation.messages.includes(message)) store.keep(conversation);
  if (running === controller) {
    running = null;
    showRunning(false);
    if (conversation === current) {
      const follows = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
      // The rest stays as it is: another message, or a setting, may be edited at this moment.
      node.replaceWith(messageNode(message, conversation.messages.indexOf(message)));
      showList();
      if (follows) scroll.scrollTop = scroll.scrollHeight;
    }
  }
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
  if (!text.value.trim() || running) return;
  const said = text.value;
  text.value = "";
  fit();
  say(said);
});

showTheme();
show();
showModels();
