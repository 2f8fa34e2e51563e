// Colours of code. highlight.js is fetched when a message names a language that it may know.

const MOST = 50_000; // characters of code that is coloured
const KEPT = 200; // blocks, so that an answer that grows is not coloured anew with each piece
const coloured = new Map();
let highlighter = null, coming = null;

/** Colour a block of code that names its language. */
export function colour(code) {
  const language = /^language-(\S+)$/.exec(code.className)?.[1];
  if (!language || code.textContent.length > MOST) return;
  if (highlighter) return colourIn(code, language);
  coming ??= import("./libraries/highlight.min.js").then((found) => (highlighter = found.default));
  coming.then(() => colourIn(code, language), () => (coming = null)); // the next message tries again
}

function colourIn(code, language) {
  if (!highlighter.getLanguage(language)) return;
  const text = code.textContent, key = `${language} ${text}`;
  if (!coloured.has(key)) {
    if (coloured.size >= KEPT) coloured.clear();
    const markup = highlighter.highlight(text, { language, ignoreIllegals: true }).value;
    const allowed = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };
    coloured.set(key, DOMPurify.sanitize(markup, allowed));
  }
  code.replaceChildren(coloured.get(key).cloneNode(true));
}
