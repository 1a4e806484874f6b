// SPDX-License-Identifier: Apache-2.0
// What the browser keeps: conversations and settings for good, the API key as long as the tab.

const CONVERSATIONS = "anyaccel.conversations";
const SETTINGS = "anyaccel.settings";
const KEY = "anyaccel.key";
const MOST = 200;

// What requests say only where somebody has set it: null leaves it to the model.
export const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const DEFAULTS = { ...Object.fromEntries(NUMBERS.map((name) => [name, null])), theme: "system", model: "", version: 2 };
// The first version kept these beside whatever was set, and its requests said them: nobody has chosen them.
const UNCHOSEN = { temperature: 0.7, top_p: 1, top_k: 0, max_tokens: 0 };

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

function readSettings() {
  const kept = { ...read(SETTINGS, {}) };
  if (kept.version === undefined) {
    for (const [name, value] of Object.entries(UNCHOSEN)) if (kept[name] === value) delete kept[name];
  }
  return { ...DEFAULTS, ...kept, version: DEFAULTS.version };
}

export const settings = readSettings();
export const saveSettings = () => write(SETTINGS, settings);

/** The fields of a request that somebody has set. */
export const numbers = () =>
  Object.fromEntries(NUMBERS.map((name) => [name, settings[name]]).filter(([, value]) => value !== null));

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
