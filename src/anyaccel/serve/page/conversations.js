// SPDX-License-Identifier: Apache-2.0
// The conversations that the browser keeps, each under a key of its own, so that tabs do not write over each other's.

import { keepsAnything, read, remove as removeKey, write } from "./store.js";

const OWN = "anyaccel.conversation.";
export const LIVES_MS = 10_000; // an answer that has not been saved for this long does not come any more

let list = [];
let watcher = { changed() {}, isBusy: () => false };
const unsaved = new Set(); // those that are in this tab alone, as the browser had no room

export const all = () => list;
export const isUnsaved = () => unsaved.size > 0;

function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function create() {
  return { id: newId(), title: "", system: "", messages: [], changed: Date.now() };
}

const isMessage = (value) => typeof value?.role === "string" && typeof value.content === "string";
const isOne = (value) => typeof value?.id === "string" && Array.isArray(value.messages) && value.messages.every(isMessage);

function load() {
  list = keys().map((key) => read(key, null)).filter(isOne);
  sort();
}

function keys() {
  try {
    return Object.keys(localStorage).filter((key) => key.startsWith(OWN));
  } catch {
    return []; // a browser that keeps nothing
  }
}

const sort = () => list.sort((one, other) => other.changed - one.changed);

/**
 * Keep a conversation, in this tab alone if the browser has no room for it.
 *
 * If another tab has changed it in the meantime, this tab's goes on as a copy, so that neither is lost.
 */
export function keep(conversation) {
  const there = read(OWN + conversation.id, null);
  if (isOne(there) && there.revision !== conversation.revision) {
    if (!list.includes(conversation)) list.push(conversation);
    list.push(there);
    conversation.id = newId();
    conversation.title = `${conversation.title} (2)`;
  }
  conversation.changed = Date.now();
  if (!list.includes(conversation)) list.push(conversation);
  sort();
  const { revision } = conversation;
  conversation.revision = newId();
  if (write(OWN + conversation.id, conversation)) {
    unsaved.delete(conversation);
  } else {
    conversation.revision = revision; // of what is there still
    unsaved.add(conversation);
  }
}

/** Delete a conversation, and keep what has waited for its room. */
export function remove(conversation) {
  list = list.filter((each) => each !== conversation);
  unsaved.delete(conversation);
  removeKey(OWN + conversation.id);
  for (const each of [...unsaved]) keep(each);
}

/** Why something is not kept. */
export const problem = () =>
  keepsAnything()
    ? "This browser has no room left for the conversation: so far it is in this tab alone."
    : "This browser keeps nothing for this page: conversations are in this tab alone.";

/** What has become of an answer that this tab does not receive: "" (complete), "coming" or "interrupted". */
export function stateOf(message) {
  if (message.finish === "interrupted") return "interrupted";
  if (!message.coming) return "";
  return Date.now() - message.coming < LIVES_MS ? "coming" : "interrupted";
}

/** All conversations as a file's text. */
export const exported = () => JSON.stringify(list, null, 1);

/**
 * Report what other tabs do: `changed(conversation, isRemoved)`. While a conversation `isBusy`, or is not saved, changes
 * of it are left for `keep` to find.
 */
export function watch(handlers) {
  watcher = handlers;
}

function take(key) {
  const id = key.slice(OWN.length);
  const there = read(key, null);
  const here = list.find((each) => each.id === id);
  if (isOne(there) && here) {
    if (watcher.isBusy(here) || unsaved.has(here)) return;
    for (const name of Object.keys(here)) delete here[name];
    Object.assign(here, there);
    sort();
    watcher.changed(here, false);
  } else if (isOne(there)) {
    list.push(there);
    sort();
    watcher.changed(there, false);
  } else if (here && !unsaved.has(here)) {
    list = list.filter((each) => each !== here);
    watcher.changed(here, true);
  }
}

globalThis.addEventListener?.("storage", (event) => {
  if (event.key?.startsWith(OWN)) take(event.key);
});
load();
