// The page's state, and what its buttons and keys do.

import { answer, properties } from "./ask.js";
import { make, messageView } from "./message.js";
import { bindSettings, bodyOf } from "./sampling.js";
import * as store from "./store.js";

const at = (id) => document.getElementById(id);
const DRAWING_MS = 100; // between drawings of an answer that comes
const KEEPING_MS = 1000;
let conversation = store.conversations()[0] ?? store.newConversation();
let running = null; // the answer that is coming: what stops it, and whose it is

// Showing

function showList() {
  const found = store.conversations();
  const items = found.map((one) => {
    const item = make("li"), button = make("button", "", titleOf(one));
    button.type = "button";
    if (one.id === conversation.id) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => open(one));
    item.append(button);
    return item;
  });
  at("list").replaceChildren(...items);
}

const titleOf = (one) => one.title || one.messages[0]?.content.slice(0, 60) || "New conversation";

function showMessages() {
  const { messages } = conversation;
  const box = at("messages"), top = box.scrollTop, isHere = box.contains(document.activeElement);
  const last = messages.length - 1;
  const views = messages.map((message, index) => messageView(message, acts(message, index, index === last)));
  const empty = make("p", "empty", "Ask the model something. It runs on this server; nothing goes elsewhere.");
  box.replaceChildren(...(views.length ? views : [empty]));
  if (isHere) at("prompt").focus(); // the button that was pressed is gone
  at("title").value = titleOf(conversation);
  document.title = `${titleOf(conversation)} · edgespec`;
  box.scrollTop = box.scrollHeight;
  return { views, scrollBack: () => (box.scrollTop = top) };
}

function acts(message, index, isLast) {
  if (message.isOpen) return {};
  if (message.role === "user") {
    return { Edit: () => edit(index), ...(isLast ? { "Try again": () => ask() } : {}) };
  }
  return { Copy: () => navigator.clipboard.writeText(message.content), ...(isLast ? { Regenerate: regenerate } : {}) };
}

function say(text) {
  at("status").textContent = text;
}

function notice(text) {
  at("notice").textContent = text;
  at("notice").hidden = !text;
}

function showRunning() {
  at("send").hidden = Boolean(running);
  at("stop").hidden = !running;
}

// Conversations

function open(one) {
  if (one.id === conversation.id && one !== conversation) return toggleSide(false); // a copy of what is shown
  if (running) stop();
  conversation = one;
  closeBrokenOff();
  notice("");
  toggleSide(false);
  showList();
  showMessages();
  at("prompt").focus();
}

/** An answer that was coming when the page was closed comes no more. */
function closeBrokenOff() {
  for (const message of conversation.messages) {
    if (message.isOpen) Object.assign(message, { isOpen: false, ending: "broken off" });
  }
}

function keep(one = conversation) {
  if (one.isGone) return;
  if (!store.keep(one)) notice("This browser has no more room. Export or delete a conversation.");
}

function exportIt() {
  const messages = conversation.messages.map(({ role, content }) => ({ role, content }));
  const content = { schema: "edgespec.session/1", title: titleOf(conversation), messages };
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(content, null, 2)], { type: "application/json" }));
  link.download = `${titleOf(conversation).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)}.json`;
  link.click();
  URL.revokeObjectURL(link.href);
}

function remove() {
  if (!confirm(`Delete “${titleOf(conversation)}”?`)) return;
  conversation.isGone = true; // an answer that is still coming must not keep it
  store.forget(conversation);
  open(store.conversations()[0] ?? store.newConversation());
}

// Asking

function send() {
  const text = at("prompt").value;
  if (!text.trim() || running) return;
  conversation.messages.push({ role: "user", content: text });
  at("prompt").value = "";
  fit(at("prompt"));
  ask();
}

function regenerate() {
  if (running) return;
  const before = [...conversation.messages];
  conversation.messages.pop();
  ask({ before });
}

function edit(index, text = conversation.messages[index].content) {
  if (running) return;
  const view = at("messages").children[index];
  const field = make("textarea");
  field.value = text;
  field.setAttribute("aria-label", "Edit the message");
  const [done, cancel] = [make("button", "main", "Send anew"), make("button", "plain", "Cancel")];
  const form = make("form", "editing");
  const row = make("div", "acts");
  row.append(make("span", "quiet", "What follows is asked anew."), cancel, done);
  form.append(field, row);
  cancel.type = "button";
  cancel.addEventListener("click", showMessages);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!field.value.trim()) return;
    const before = [...conversation.messages], text = field.value;
    conversation.messages.splice(index, Infinity, { role: "user", content: text });
    ask({ before, goBack: () => edit(index, text) });
  });
  view.querySelector(":scope > .body").replaceChildren(form);
  view.querySelector("footer").hidden = true;
  field.addEventListener("keydown", (event) => keys(event, () => form.requestSubmit(), showMessages));
  field.addEventListener("input", () => fit(field));
  fit(field);
  field.focus();
}

/** Ask for an answer to the messages. Where none comes, those `before` come back, and `goBack` is called. */
async function ask({ before = null, goBack = () => {} } = {}) {
  const asked = conversation;
  const said = { role: "assistant", content: "", reasoning: "", tokens: [], isOpen: true };
  const body = bodyOf(asked.messages);
  asked.messages.push(said);
  const stopping = new AbortController();
  running = stopping;
  notice("");
  keep();
  showList();
  showRunning();
  say("The answer is coming.");
  const view = showMessages().views.at(-1);
  let drawn = 0, kept = performance.now();
  try {
    for await (const event of answer(body, stopping.signal)) {
      take(said, event);
      const now = performance.now();
      if (now - drawn > DRAWING_MS) {
        drawn = now;
        draw(view);
      }
      if (now - kept > KEEPING_MS) {
        kept = now;
        keep(asked);
      }
    }
    say(`The answer is complete: ${said.timings?.predicted_n ?? 0} tokens.`);
  } catch (error) {
    if (error.name === "AbortError") {
      said.ending = "stopped";
      say("Stopped.");
    } else {
      said.ending = "broken off";
      if (asked === conversation) notice(error.message);
      if (error.status === 401) at("settings").showModal(), at("key").focus();
    }
  }
  delete said.isOpen;
  delete said.progress;
  const isEmpty = !said.content && !said.reasoning && said.ending;
  const isBack = before && (isEmpty || said.ending === "broken off");
  if (isBack) asked.messages = before;
  else if (isEmpty) asked.messages.pop();
  keep(asked);
  if (running === stopping) running = null;
  showRunning();
  showList();
  if (asked !== conversation) return;
  const isAtEnd = readsEnd(), hasThoughts = view.querySelector(".thoughts").open;
  const { views, scrollBack } = showMessages();
  if (!isAtEnd) scrollBack();
  const thoughts = views.at(-1)?.querySelector(".thoughts");
  if (thoughts) thoughts.open = hasThoughts;
  if (isBack) goBack();
}

/** Return whether the end is in sight; who reads above is left there. */
function readsEnd() {
  const box = at("messages");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 80;
}

function take(said, event) {
  if (event.reading) said.progress = event.reading;
  for (const { delta, finish_reason } of event.choices ?? []) {
    said.content += delta.content ?? "";
    said.reasoning += delta.reasoning_content ?? "";
    if (finish_reason === "length") said.ending = "cut at the most tokens";
  }
  if (event.timings) said.timings = event.timings;
  if (!event.draft) return;
  const { tokens, nodes_by_depth: sizes, num_accepted: accepted } = event.draft;
  if (sizes.length) said.tree = { sizes, accepted };
  for (const [text, foreseen] of tokens) {
    const last = said.tokens.at(-1);
    if (last && last[1] === foreseen) last[0] += text;
    else said.tokens.push([text, foreseen]);
  }
}

function draw(view) {
  const box = at("messages");
  const isAtEnd = readsEnd();
  view.fill();
  if (isAtEnd) box.scrollTop = box.scrollHeight;
}

function stop() {
  running?.abort();
}

// Keys and small things

function keys(event, onEnter, onEscape) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    onEnter();
  } else if (event.key === "Escape") {
    event.stopPropagation();
    onEscape();
  }
}

function fit(field) {
  field.rows = Math.min(10, field.value.split("\n").length + Math.floor(field.value.length / 90));
}

function toggleSide(isOpen) {
  document.body.classList.toggle("side-open", isOpen);
  at("menu").setAttribute("aria-expanded", String(isOpen));
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  store.keepTheme(name);
}

async function showModel() {
  try {
    const { model, placement } = await properties();
    const { layers, resident_layers: resident } = placement;
    at("model").textContent = resident < layers ? `${model} · ${resident} of ${layers} layers stay` : model;
    notice("");
  } catch (error) {
    notice(error.message);
    if (error.status === 401 && !at("settings").open) at("settings").showModal(), at("key").focus();
  }
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("prompt").addEventListener("keydown", (event) => keys(event, send, stop));
at("prompt").addEventListener("input", () => fit(at("prompt")));
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || at("settings").open) return;
  stop();
  toggleSide(false);
  at("more").open = false;
});
at("stop").addEventListener("click", () => {
  stop();
  at("prompt").focus();
});
at("new").addEventListener("click", () => open(store.newConversation()));
at("menu").addEventListener("click", () => toggleSide(!document.body.classList.contains("side-open")));
at("export").addEventListener("click", exportIt);
at("remove").addEventListener("click", remove);
at("settings-open").addEventListener("click", () => at("settings").showModal());
at("settings").addEventListener("close", () => {
  store.keepKey(at("key").value);
  showModel();
});
at("theme").addEventListener("click", () => {
  const isDark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  setTheme(isDark ? "light" : "dark");
});
at("title").addEventListener("change", () => {
  conversation.title = at("title").value.trim();
  keep();
  showList();
});
at("more").addEventListener("click", (event) => {
  if (event.target.tagName === "BUTTON") at("more").open = false;
});

if (store.theme()) setTheme(store.theme());
at("key").value = store.key();
closeBrokenOff();
bindSettings(showMessages);
showList();
showMessages();
showRunning();
showModel();
if (matchMedia("(min-width: 48rem)").matches) at("prompt").focus(); // on a phone its keyboard would cover the page
