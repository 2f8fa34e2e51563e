// Mathematics between dollars or TeX's brackets. KaTeX sets it, which is fetched when a message has some.

const MOST = 5000; // characters of a formula that is set
const KEPT = 500; // formulas, so that an answer that grows is not set anew with each piece
const INLINE = [/^\$\$([^$]+?)\$\$/, /^\\\[([\s\S]+?)\\\]/, /^\\\(([\s\S]+?)\\\)/, /^\$((?:\\[^\n]|[^$\\\n])+?)\$(?![\w$])/];
const BLOCK = [/^ {0,3}\$\$([\s\S]+?)\$\$[ \t]*(?:\n|$)/, /^ {0,3}\\\[([\s\S]+?)\\\][ \t]*(?:\n|$)/];
const set = new Map(); // what was set: nodes by the formula
let katex = null, coming = null;

/** What marked needs to find formulas; `shown` makes a text of markup. */
export function formulas(shown) {
  const renderer = ({ raw, text, isBlock }) => {
    const code = `<code class="formula${isBlock ? " block" : ""}" data-formula="${shown(text)}">${shown(raw.trim())}</code>`;
    return isBlock && raw.endsWith("\n") ? `<p>${code}</p>` : code;
  };
  const found = (type, patterns) => (src) => {
    const index = patterns.findIndex((one) => one.test(src));
    if (index < 0) return undefined;
    const [raw, text] = patterns[index].exec(src);
    const isMoney = index === 3 && (/^\s|\s$/.test(text)); // “$5 and $ 6”
    return isMoney ? undefined : { type, raw, text, isBlock: patterns === BLOCK || index < 2 };
  };
  return [
    {
      name: "formulaBlock", level: "block", renderer, tokenizer: found("formulaBlock", BLOCK),
      start: (src) => src.match(/\n {0,3}(?:\$\$|\\\[)/)?.index,
    },
    {
      name: "formula", level: "inline", renderer, tokenizer: found("formula", INLINE),
      start: (src) => {
        const match = /(^|[^\w$\\])\$|\\[[(]/.exec(src); // a dollar after a letter or a digit is one
        return match ? match.index + (match[1]?.length ?? 0) : undefined;
      },
    },
  ];
}

/** Set the formulas of a text; until KaTeX is here, and where it refuses one, they stand as they are written. */
export function setFormulas(nodes) {
  const found = [...nodes.querySelectorAll("code.formula")].filter(({ dataset }) => dataset.formula.length <= MOST);
  if (found.length) whenHere(() => found.forEach(setOne));
}

function whenHere(act) {
  if (katex) return act();
  coming ??= fetched();
  coming.then(act, () => (coming = null)); // the next message tries again
}

async function fetched() {
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = "page/libraries/katex.min.css";
  document.head.append(link);
  await import("./libraries/katex.min.js"); // it makes itself a global name
  katex = window.katex;
}

function setOne(node) {
  const formula = node.dataset.formula, displayMode = node.classList.contains("block"), key = `${displayMode} ${formula}`;
  if (!set.has(key)) {
    if (set.size >= KEPT) set.clear();
    set.set(key, nodesOf(formula, displayMode));
  }
  const made = set.get(key);
  if (made) node.replaceWith(made.cloneNode(true));
}

/**
 * Return the nodes of a formula, or null. The policy takes no styles from markup, and KaTeX's markup has some: they
 * are put in by way of each node's own style, which is no markup.
 */
function nodesOf(formula, displayMode) {
  let markup;
  try {
    markup = katex.renderToString(formula, { displayMode, throwOnError: true, trust: false, strict: "ignore", maxSize: 20 });
  } catch {
    return null;
  }
  // Only tags of KaTeX's own have quotes: it writes those of a formula as &quot;
  const nodes = DOMPurify.sanitize(markup.replaceAll(/ (?=style=")/g, " data-"), {
    USE_PROFILES: { html: true, svg: true, mathMl: true },
    ADD_FORBID_CONTENTS: ["annotation"],
    ALLOW_DATA_ATTR: true,
    RETURN_DOM_FRAGMENT: true,
  });
  for (const one of nodes.querySelectorAll("[data-style]")) {
    one.style.cssText = one.dataset.style;
    delete one.dataset.style;
  }
  return nodes;
}
