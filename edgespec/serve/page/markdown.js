// Markdown to nodes, safely: tags in a text are shown as they are written, and what is made of the rest is cleaned.

import { colour } from "./code.js";
import { formulas, setFormulas } from "./formula.js";
import { Marked } from "./libraries/marked.esm.js";

const TAGS = [
  "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
  "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
];
const SIGNS = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const shown = (text) => text.replace(/[&<>"']/g, (sign) => SIGNS[sign]);

const marked = new Marked({
  breaks: true,
  extensions: formulas(shown),
  renderer: {
    html: ({ text }) => shown(text),
    image: ({ href, text }) => `<a href="${shown(href)}">${shown(text || href)}</a>`, // nothing is fetched
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("rel", "noopener noreferrer nofollow");
  node.setAttribute("target", "_blank");
});

/** Return a fragment that shows a text. */
export function rendered(text) {
  const nodes = DOMPurify.sanitize(marked.parse(text), {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ["href", "start", "align", "class", "data-formula"],
    ADD_URI_SAFE_ATTR: ["start", "align", "data-formula"], // which are no addresses
    ALLOW_DATA_ATTR: false,
    ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
    RETURN_DOM_FRAGMENT: true,
  });
  for (const code of nodes.querySelectorAll("pre code")) colour(code);
  for (const block of nodes.querySelectorAll("pre")) withCopying(block);
  setFormulas(nodes);
  for (const table of nodes.querySelectorAll("table")) {
    const frame = document.createElement("div");
    frame.className = "scrolls";
    table.replaceWith(frame);
    frame.append(table);
  }
  return nodes;
}

function withCopying(block) {
  const frame = document.createElement("div");
  const button = document.createElement("button");
  frame.className = "code";
  block.tabIndex = 0; // so that a keyboard can scroll it
  button.type = "button";
  button.textContent = "Copy";
  button.setAttribute("aria-label", "Copy the code");
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(block.textContent);
    button.textContent = "Copied";
  });
  block.replaceWith(frame);
  frame.append(block, button);
}
