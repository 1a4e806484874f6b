// SPDX-License-Identifier: Apache-2.0
// The conversations that the browser keeps, in IndexedDB, which its tabs share. Tabs tell each other what they have changed.

import * as local from "./store.js";
import * as tree from "./tree.js";
import { openDB } from "./vendor/idb.js";

const NAME = "anyaccel";
const STORE = "conversations";
const OLD = "anyaccel.conversation."; // where earlier versions of the page had them in localStorage
const LEFT = "anyaccel.left."; // conversations whose page was left before they were kept
export const LIVES_MS = 10_000; // an answer that has not been saved for this long does not come any more

let database = null;
let list = [];
let watcher = () => {};
let wrong = ""; // why something is not kept
const unsaved = new Set(); // those that are in this tab alone
const keeping = new Map(); // what is being written -> its conversation
const others = new BroadcastChannel(NAME);

export const all = () => list;
export const isUnsaved = () => unsaved.size > 0;
export const problem = () => wrong;

const sort = () => list.sort((one, other) => other.changed - one.changed);
const byId = (id) => list.find((each) => each.id === id);

/** Open what the browser keeps, and read it. */
export async function load() {
  try {
    database = await openDB(NAME, 1, { upgrade: (made) => made.createObjectStore(STORE, { keyPath: "id" }) });
    list = (await database.getAll(STORE)).map(tree.understood).filter(Boolean);
  } catch {
    database = null; // a browser that keeps nothing; said once there is something to keep
  }
  sort();
  if (database) await takeOld();
  await takeLeft();
}

async function takeOld() {
  for (const key of local.keys(OLD)) {
    const old = tree.understood(local.read(key, null));
    if (!old || byId(old.id)) continue;
    await keep(old, old.changed);
    if (!unsaved.has(old)) local.remove(key);
  }
}

/** Conversations whose page was left before they were kept. */
async function takeLeft() {
  for (const key of local.keys(LEFT)) {
    const left = tree.understood(local.read(key, null));
    local.remove(key);
    if (!left) continue;
    const own = byId(left.id);
    if (own) {
      tree.merge(own, left);
      own.leaf = left.leaf;
    }
    await keep(own ?? left, left.changed);
  }
}

/** The page is left: write what it is about to keep, and answers that come, where that takes no time. */
export function leave(running) {
  const answers = new Map(running);
  for (const conversation of new Set([...answers.keys(), ...keeping.values()])) {
    const message = answers.get(conversation);
    if (message) Object.assign(message, { coming: undefined, finish: "interrupted", saved: Date.now() });
    local.write(LEFT + conversation.id, tree.kept(conversation));
  }
}

/** Keep a conversation, with what other tabs have made of it; in this tab alone if the browser cannot. */
export async function keep(conversation, changed = Date.now()) {
  conversation.changed = changed;
  if (!list.includes(conversation)) list.push(conversation);
  sort();
  const mark = {};
  keeping.set(mark, conversation);
  try {
    if (!database) throw new Error("no database");
    const work = database.transaction(STORE, "readwrite");
    const ended = work.done.catch((error) => error);
    const there = tree.understood(await work.store.get(conversation.id));
    if (there) tree.merge(conversation, there);
    await work.store.put(tree.kept(conversation));
    const error = await ended;
    if (error) throw error;
    unsaved.delete(conversation);
    others.postMessage({ id: conversation.id });
  } catch (error) {
    unsaved.add(conversation);
    wrong =
      error.name === "QuotaExceededError"
        ? "This browser has no room left for the conversation: so far it is in this tab alone."
        : `This browser keeps nothing for this page (${error.message}): conversations are in this tab alone.`;
  } finally {
    keeping.delete(mark);
  }
}

/** Delete a conversation, and keep what has waited for its room. */
export async function remove(conversation) {
  list = list.filter((each) => each !== conversation);
  unsaved.delete(conversation);
  await database?.delete(STORE, conversation.id);
  others.postMessage({ id: conversation.id });
  for (const each of [...unsaved]) await keep(each);
}

/** Keep the conversations of a file; how many there were, and how many things that are none. */
export async function take(text) {
  const value = JSON.parse(text);
  const all = Array.isArray(value) ? value : [value];
  const found = all.map(tree.understood).filter(Boolean);
  for (const each of found) {
    const own = byId(each.id);
    if (own) tree.merge(own, each);
    await keep(own ?? each, Math.max(own?.changed ?? 0, each.changed));
  }
  return [found.length, all.length - found.length];
}

/** What has become of an answer that this tab does not receive: "" (complete), "coming" or "interrupted". */
export function stateOf(message) {
  if (message.finish === "interrupted") return "interrupted";
  if (!message.coming) return "";
  return Date.now() - message.coming < LIVES_MS ? "coming" : "interrupted";
}

/** Report what other tabs do: `changed(conversation, isRemoved)`. */
export function watch(changed) {
  watcher = changed;
}

others.addEventListener("message", async ({ data: { id } }) => {
  const there = tree.understood(await database?.get(STORE, id));
  const here = byId(id);
  if (there && here) tree.merge(here, there);
  else if (there) list.push(there);
  else if (here && !unsaved.has(here)) list = list.filter((each) => each !== here);
  else return;
  sort();
  watcher(here ?? there, !there);
});
