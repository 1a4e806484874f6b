// SPDX-License-Identifier: Apache-2.0
// Nodes of the page.

/** An element with children. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value != null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export const button = (text, onclick, more = {}) => element("button", { type: "button", onclick, ...more }, text);

/** A button that copies a text, also where the page has come without HTTPS and browsers give it no clipboard. */
export function copyButton(text) {
  const made = element("button", { type: "button", class: "quiet" }, "Copy");
  made.addEventListener("click", async () => {
    if (navigator.clipboard) await navigator.clipboard.writeText(text());
    else {
      const field = element("textarea", { class: "unseen" });
      field.value = text();
      document.body.append(field);
      field.select();
      document.execCommand("copy");
      field.remove();
    }
    made.textContent = "Copied";
    setTimeout(() => (made.textContent = "Copy"), 1500);
  });
  return made;
}

/** Have the browser save a text as a file. */
export function save(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
