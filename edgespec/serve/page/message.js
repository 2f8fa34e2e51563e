// One message as it is shown, and what can be done with it.

import { button, fit, keys, make } from "./make.js";
import { rendered } from "./markdown.js";
import { shownPictures } from "./pictures.js";
import { settings } from "./store.js";
import { treePicture } from "./tree.js";

/**
 * Return the view of a message. `acts` are words and what they do; `turns` are its versions, how many there are, which
 * one it is, and what shows another; `editing` is what happens to a message that is being edited.
 */
export function messageView(message, { acts = {}, turns = null, editing = null }) {
  const view = make("article", message.role);
  view.setAttribute("aria-label", message.role === "user" ? "You" : "Answer");
  const [thoughts, body, foot] = [make("details", "thoughts"), make("div", "body"), make("footer")];
  const thought = make("div", "body");
  thoughts.append(make("summary", "", "Thoughts"), thought);
  const buttons = make("div", "acts");
  const numbers = make("details", "numbers");
  if (turns) buttons.append(versions(turns));
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
  if (message.edit !== undefined && editing) {
    body.replaceChildren(editForm(message, editing));
    foot.hidden = true;
  }
  return view;
}

function versions({ number, count, show }) {
  const frame = make("span", "versions");
  const [earlier, later] = [button("‹", () => show(number - 1)), button("›", () => show(number + 1))];
  earlier.setAttribute("aria-label", "Earlier version");
  later.setAttribute("aria-label", "Later version");
  [earlier.disabled, later.disabled] = [number === 0, number === count - 1];
  frame.append(earlier, make("span", "", `${number + 1}/${count}`), later);
  return frame;
}

function editForm(message, { onInput, onDone, onCancel }) {
  const [form, field, row] = [make("form", "editing"), make("textarea"), make("div", "acts")];
  field.value = message.edit;
  field.setAttribute("aria-label", "Edit the message");
  const note = make("span", "quiet", "It is asked anew. What was said stays, as another version.");
  row.append(note, button("Cancel", onCancel), make("button", "main", "Send"));
  form.append(field, row);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim()) onDone(field.value);
  });
  field.addEventListener("keydown", (event) => keys(event, () => form.requestSubmit(), onCancel));
  field.addEventListener("input", () => {
    fit(field);
    onInput(field.value);
  });
  fit(field);
  return form;
}

function fillBody(body, message) {
  if (message.role === "user") {
    body.textContent = message.content;
    if (message.images?.length) body.prepend(shownPictures(message.images));
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
  if (timings?.prompt_n !== undefined) {
    const read = `${timings.prompt_n} tokens read, ${timings.cache_n} kept from before; ` +
      `${timings.draft_n} drafted, ${timings.draft_n_accepted} of them accepted.`;
    numbers.append(make("p", "", read));
  } else if (timings?.isMeasuredHere) {
    numbers.append(make("p", "", "Measured in this browser, because the server's numbers come at an answer's end."));
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
