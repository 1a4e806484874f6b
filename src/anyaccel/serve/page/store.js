// SPDX-License-Identifier: Apache-2.0
// What the browser keeps: settings for good, the API key as long as the tab.

export const SETTINGS = "anyaccel.settings";
const KEY = "anyaccel.key";

// What requests say only where somebody has set it: null leaves it to the model.
export const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const DEFAULTS = { ...Object.fromEntries(NUMBERS.map((name) => [name, null])), theme: "system", model: "", version: 2 };
// The first version kept these beside whatever was set, and its requests said them: nobody has chosen them.
const UNCHOSEN = { temperature: 0.7, top_p: 1, top_k: 0, max_tokens: 0 };

export function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise; // a browser that keeps nothing, or something else of this name
  }
}

export function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export function remove(name) {
  try {
    localStorage.removeItem(name);
  } catch {
    // a browser that keeps nothing has nothing to remove
  }
}

/** Whether the browser keeps anything: false where the user has forbidden it. */
export function keepsAnything() {
  try {
    return localStorage !== null;
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

/** Read again what another tab has set. */
export const readAgain = () => Object.assign(settings, readSettings());

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
