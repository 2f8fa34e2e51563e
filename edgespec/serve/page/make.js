// Nodes of the page, what it says, and what fields have in common.

export const at = (id) => document.getElementById(id);

export function make(name, className = "", text = "") {
  const node = document.createElement(name);
  node.className = className;
  node.textContent = text;
  return node;
}

export function button(text, act, className = "plain") {
  const node = make("button", className, text);
  node.type = "button";
  node.addEventListener("click", act);
  return node;
}

/** Enter does one thing in a field of several lines, Escape another. */
export function keys(event, onEnter, onEscape) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    onEnter();
  } else if (event.key === "Escape") {
    event.stopPropagation();
    onEscape();
  }
}

/** Let a field be as high as its text, up to ten lines. */
export function fit(field) {
  field.rows = Math.min(10, field.value.split("\n").length + Math.floor(field.value.length / 90));
}

/** Say something to who listens to the page. */
export function say(text) {
  at("status").textContent = text;
}

/** Show a sentence above the field: what went wrong, or with the id `news` what was done. */
export function notice(text, id = "notice") {
  for (const one of ["notice", "news"]) at(one).hidden = true;
  at(id).textContent = text;
  at(id).hidden = !text;
}

/** Show or hide the conversations where the window is narrow. */
export function toggleSide(isOpen) {
  document.body.classList.toggle("side-open", isOpen);
  at("menu").setAttribute("aria-expanded", String(isOpen));
}
