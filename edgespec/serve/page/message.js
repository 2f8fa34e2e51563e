// One message as it is shown, and what can be done with it.

import { rendered } from "./markdown.js";
import { settings } from "./store.js";
import { treePicture } from "./tree.js";

export function make(name, className = "", text = "") {
  const node = document.createElement(name);
  node.className = className;
  node.textContent = text;
  return node;
}

function button(text, act) {
  const node = make("button", "plain", text);
  node.type = "button";
  node.addEventListener("click", act);
  return node;
}

/** Return the view of a message; `acts` are words and what they do. */
export function messageView(message, acts) {
  const view = make("article", message.role);
  view.setAttribute("aria-label", message.role === "user" ? "You" : "Answer");
  const [thoughts, body, foot] = [make("details", "thoughts"), make("div", "body"), make("footer")];
  const thought = make("div", "body");
  thoughts.append(make("summary", "", "Thoughts"), thought);
  const buttons = make("div", "acts");
  const numbers = make("details", "numbers");
  buttons.append(...Object.entries(acts).map(([text, act]) => button(text, act)));
  foot.append(numbers, buttons);
  view.append(make("h2", "who", message.role === "user" ? "You" : "Answer"), thoughts, body, foot);
  view.fill = () => {
    thoughts.hidden = !message.reasoning;
    if (message.reasoning) thought.replaceChildren(rendered(message.reasoning));
    fillBody(body, message);
    fillNumbers(numbers, message);
  };
  view.fill();
  return view;
}

function fillBody(body, message) {
  if (message.role === "user") {
    body.textContent = message.content;
  } else if (settings.foreseen && message.tokens?.length) {
    body.replaceChildren(...message.tokens.map(([text, foreseen]) => make(foreseen ? "mark" : "span", "", text)));
  } else if (message.content) {
    body.replaceChildren(rendered(message.content));
  } else if (message.isOpen) {
    body.replaceChildren(make("p", "quiet waiting", message.progress ?? "waiting for the first token"));
  } else {
    body.replaceChildren();
  }
  body.classList.toggle("tokens", Boolean(message.role !== "user" && settings.foreseen && message.tokens?.length));
}

function fillNumbers(numbers, { timings, tree, ending, isOpen }) {
  numbers.hidden = isOpen || !(timings || ending);
  if (numbers.hidden) return;
  const words = [];
  if (timings?.predicted_per_second) words.push(`${timings.predicted_per_second.toFixed(1)} tokens/s`);
  if (timings?.tokens_per_pass) words.push(`${timings.tokens_per_pass.toFixed(2)} a pass`);
  if (timings) words.push(`${timings.predicted_n} tokens`);
  if (ending) words.push(ending);
  const open = numbers.open;
  numbers.replaceChildren(make("summary", "", words.join(" · ")));
  numbers.open = open;
  if (timings) {
    const read = `${timings.prompt_n} tokens read, ${timings.cache_n} kept from before; ` +
      `${timings.draft_n} drafted, ${timings.draft_n_accepted} of them accepted.`;
    numbers.append(make("p", "", read));
  }
  if (tree?.sizes.length) {
    const [picture, label] = treePicture(tree);
    const frame = make("figure", "scrolls");
    frame.tabIndex = 0;
    frame.setAttribute("aria-label", "Picture of the last tree");
    numbers.append(frame);
    frame.append(picture, make("figcaption", "", label));
  }
}
