// SPDX-License-Identifier: Apache-2.0
// What the browser keeps beside conversations: settings for good, the API key as long as the tab.

export const SETTINGS = "anyaccel.settings";
const KEY = "anyaccel.key";

// Fields of requests that are sent only where somebody has set them: null leaves them to the model.
export const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const DEFAULTS = { ...Object.fromEntries(NUMBERS.map((name) => [name, null])), theme: "system", model: "", tools: "" };

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

/** The names that begin so. */
export function keys(start) {
  try {
    return Object.keys(localStorage).filter((key) => key.startsWith(start));
  } catch {
    return [];
  }
}

const readSettings = () => ({ ...DEFAULTS, ...read(SETTINGS, {}) });

export const settings = readSettings();
export const saveSettings = () => write(SETTINGS, settings);

/** The fields of a request that somebody has set. */
export const numbers = () =>
  Object.fromEntries(NUMBERS.map((name) => [name, settings[name]]).filter(([, value]) => value !== null));

/** The functions that the model may call: as in a request, or without `{"type": "function"}` around each. */
export function tools(text = settings.tools) {
  if (!text.trim()) return [];
  const value = JSON.parse(text);
  return (Array.isArray(value) ? value : [value]).map((each) => (each.function ? each : { type: "function", function: each }));
}

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
