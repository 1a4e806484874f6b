// SPDX-License-Identifier: Apache-2.0
// Messages as nodes of the page.

import { stateOf, LIVES_MS } from "./conversations.js";
import { button, copyButton, element } from "./elements.js";
import { codeBlock, draw } from "./markdown.js";
import { versions } from "./tree.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Result of a function" };

function facts(message) {
  const { stats } = message;
  const parts = message.model ? [message.model] : [];
  if (stats) parts.push(`${stats.tokens} tokens`);
  if (stats?.rate) parts.push(`${stats.rate.toFixed(1)} tokens/s`);
  if (stats) parts.push(`first after ${stats.first.toFixed(2)} s`);
  const state = stateOf(message);
  if (state === "interrupted") parts.push("interrupted: the page was closed while this answer came");
  if (state === "coming") parts.push("this answer comes in another tab");
  if (message.finish === "length") parts.push("cut by the most tokens");
  if (message.finish === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

const isCut = (message) => ["stopped", "length", "interrupted"].includes(message.finish) && message.content && !message.calls;

/**
 * A message as a node.
 *
 * `view` has what it needs: the conversation, whether the message `isLast` and `comes`, whether an answer `isRunning`, and
 * actions: `renew`, `edit`, `answer`, `regenerate`, `goOn`, `choose`, `results`.
 */
export function messageNode(message, view) {
  const under = element("div", { class: "under" });
  const body = element("div", { class: "body" });
  const label = NAMES[message.role] ?? message.role;
  const node = element("article", { class: `message ${message.role}`, "aria-label": label, "aria-busy": String(view.comes) }, body, under);
  fill(body, message, view);
  if (view.comes) return node;
  const all = versions(view.conversation, message);
  if (all.length > 1) {
    const place = all.indexOf(message);
    const turn = (by, name, text) =>
      button(text, () => view.choose(all[place + by]), { "aria-label": `${name} version`, disabled: !all[place + by] });
    under.append(
      element("span", { class: "versions" }, turn(-1, "Previous", "‹"), `${place + 1}/${all.length}`, turn(1, "Next", "›")),
    );
  }
  if (message.role !== "tool") under.append(button("Edit", () => edit(node, message, view)));
  if (message.role !== "tool") under.append(copyButton(() => message.content));
  if (message.role === "assistant") under.append(button("Regenerate", () => view.regenerate(message)));
  else if (view.isLast && !view.isRunning) under.append(button("Answer", () => view.answer(message)));
  if (message.role !== "assistant") return node;
  if (view.isLast && isCut(message) && stateOf(message) !== "coming") under.append(button("Continue", () => view.goOn(message)));
  under.append(element("span", { class: "speed" }, facts(message)));
  const later = () => node.isConnected && view.renew(message, node);
  if (stateOf(message) === "coming") setTimeout(later, LIVES_MS); // unless its tab keeps more of it
  return node;
}

/** The child of a node that has a class: made where it is wanted first, and removed where it is not any more. */
function part(body, name, isWanted, make) {
  const there = body.querySelector(`:scope > .${name}`);
  if (!isWanted) {
    there?.remove();
    return null;
  }
  if (there) return there;
  const made = make();
  body.append(made);
  return made;
}

/** The content of a message, as far as it has come. */
export function fill(body, message, view) {
  if (message.role === "tool") {
    const text = element("pre", { tabindex: "0" }, message.content);
    body.replaceChildren(element("details", {}, element("summary", {}, `Result of ${message.name}`), text));
    return;
  }
  if (message.role !== "assistant") {
    const files = (message.files ?? []).map((file) => {
      const text = element("pre", { tabindex: "0" }, file.text);
      return element("details", { class: "file" }, element("summary", {}, file.name), text);
    });
    body.replaceChildren(
      ...(files.length ? [element("div", { class: "files" }, ...files)] : []),
      element("div", { class: "text" }, message.content),
    );
    return;
  }
  const reasoning = part(body, "reasoning", message.reasoning, () => {
    const made = element("details", { class: "reasoning", open: view.comes && !message.content });
    made.append(element("summary", {}), element("div", {}));
    return made;
  });
  if (reasoning) {
    const seconds = message.thought ? ` for ${message.thought.toFixed(1)} s` : "";
    reasoning.firstChild.textContent = view.comes && !message.content ? "Thinking …" : `Thought${seconds}`;
    reasoning.lastChild.textContent = message.reasoning.trim();
  }
  draw(part(body, "text", true, () => element("div", { class: "text" })), message.content);
  const calls = part(body, "calls", message.calls, () => element("div", { class: "calls" }));
  calls?.replaceChildren(...message.calls.map((call) => callNode(call)));
  if (calls && view.isLast && !view.comes) calls.append(button("Send results", () => sendResults(calls, message, view), { class: "primary" }));
  if (calls && view.isLast && !view.comes) for (const [place, each] of [...calls.querySelectorAll(".call")].entries()) each.append(resultField(message.calls[place]));
  const wrong = part(body, "wrong", message.wrong, () => element("div", { class: "wrong", role: "alert" }));
  if (wrong) wrong.textContent = message.wrong;
  part(body, "waiting", view.comes && !message.content && !message.calls, () =>
    element("span", { class: "waiting", role: "img", "aria-label": "The answer comes" }),
  );
}

function callNode({ name, text }) {
  let shown = text;
  try {
    shown = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // it has not come as a whole yet
  }
  return element("details", { class: "call" }, element("summary", {}, "Call of ", element("strong", {}, name)), codeBlock("json", shown));
}

function resultField({ name }) {
  return element("label", {}, `Result of ${name}`, element("textarea", { rows: 2 }));
}

function sendResults(calls, message, view) {
  const texts = [...calls.querySelectorAll("textarea")].map((each) => each.value);
  view.results(message, texts);
}

function edit(node, message, view) {
  const isMine = message.role === "user";
  const text = element("textarea", { rows: Math.min(12, message.content.split("\n").length + 1), "aria-label": "Message" });
  text.value = message.content;
  const done = (event) => {
    event.preventDefault();
    if (text.value.trim()) view.edit(message, text.value);
  };
  // This message alone: an answer that comes is drawn into its own node meanwhile.
  const cancel = () => {
    const again = view.renew(message, node);
    [...again.querySelectorAll(".under button")].find((each) => each.textContent === "Edit")?.focus();
  };
  const buttons = element("div", { class: "under" }, button("Cancel", cancel), button(isMine ? "Send" : "Save", done, { class: "primary" }));
  node.classList.add("edit");
  node.replaceChildren(text, buttons);
  text.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation(); // it is for this message, and not for an answer that comes
      cancel();
    }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && isMine) done(event);
  });
  text.focus();
}
