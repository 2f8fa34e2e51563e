// The conversations at the side, and the search in them.

import { at, button, make } from "./make.js";
import { conversations } from "./store.js";

const EXCERPT = [24, 60]; // characters before and after what was found

export function titleOf({ title, messages, draft }) {
  return title || messages[0]?.content.slice(0, 60) || (draft ? `Draft: ${draft.slice(0, 50)}` : "New conversation");
}

/** Show the conversations, or those that have the words of the search; `open` gets one, and the message found in it. */
export function showList(current, open) {
  const words = folded(at("search").value).split(/\s+/).filter(Boolean);
  const found = conversations().map((one) => [one, words.length ? hitIn(one, words) : {}]).filter(([, hit]) => hit);
  const items = found.map(([one, { message, excerpt }]) => {
    const item = make("li"), link = button(titleOf(one), () => open(one, message), "");
    if (one.id === current.id) link.setAttribute("aria-current", "true");
    if (excerpt) link.append(make("span", "quiet", excerpt));
    item.append(link);
    return item;
  });
  at("list").replaceChildren(...items);
  at("found").textContent = words.length ? `${found.length || "None"} found` : "";
}

/** Return text as a search compares it: without accents and capitals. */
const folded = (text) => text.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();

/** Return where a conversation has all words, in whichever branch; null where it lacks one. */
function hitIn(one, words) {
  const texts = one.messages.map(({ content }) => folded(content)), title = folded(titleOf(one));
  if (!words.every((word) => title.includes(word) || texts.some((text) => text.includes(word)))) return null;
  const counts = texts.map((text) => words.filter((word) => text.includes(word)).length);
  const best = counts.indexOf(Math.max(...counts));
  if (!counts[best]) return {};
  const message = one.messages[best];
  const place = Math.min(...words.map((word) => texts[best].indexOf(word)).filter((index) => index >= 0));
  const start = Math.max(0, place - EXCERPT[0]);
  return { message, excerpt: (start ? "…" : "") + message.content.slice(start, place + EXCERPT[1]) };
}
