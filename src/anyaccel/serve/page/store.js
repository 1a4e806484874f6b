// SPDX-License-Identifier: Apache-2.0
// What the browser keeps: conversations and settings for good, the API key as long as the tab.

const CONVERSATIONS = "anyaccel.conversations";
const SETTINGS = "anyaccel.settings";
const KEY = "anyaccel.key";
const MOST = 200;

export const DEFAULTS = { temperature: 0.7, top_p: 1, top_k: 0, max_tokens: null, seed: null, theme: "system", model: "" };

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise; // a browser that keeps nothing, or something else of this name
  }
}

function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export const settings = { ...DEFAULTS, ...read(SETTINGS, {}) };
export const saveSettings = () => write(SETTINGS, settings);

const found = read(CONVERSATIONS, []);
export let conversations = Array.isArray(found) ? found.filter((each) => each && Array.isArray(each.messages)) : [];

/** Keep all, the newest first; the oldest go where the browser has no room. */
export function save() {
  conversations.sort((one, other) => other.changed - one.changed);
  conversations = conversations.slice(0, MOST);
  while (!write(CONVERSATIONS, conversations) && conversations.length > 1) conversations.pop();
}

export function create() {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  const id = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "", system: "", messages: [], changed: Date.now() };
}

export function keep(conversation) {
  conversation.changed = Date.now();
  if (!conversations.includes(conversation)) conversations.unshift(conversation);
  save();
}

export function remove(conversation) {
  conversations = conversations.filter((each) => each !== conversation);
  save();
}

let key = "";
try {
  key = sessionStorage.getItem(KEY) ?? "";
} catch {
  key = "";
}
export const getKey = () => key;
export function setKey(text) {
  key = text;
  try {
    sessionStorage.setItem(KEY, text);
  } catch {
    // it is kept by the page alone
  }
}
