// Conversations, settings and the theme, kept in this browser; each conversation under a key of its own.

import { linked, newId } from "./branches.js";

const PREFIX = "edgespec.conversation.";

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function newConversation() {
  return { id: newId(), title: "", changed: Date.now(), draft: "", messages: [] };
}

/** Return all conversations, the last changed first. */
export function conversations() {
  return Object.keys(localStorage)
    .filter((key) => key.startsWith(PREFIX))
    .map((key) => read(key, null))
    .filter((found) => found && Array.isArray(found.messages))
    .map(linked)
    .sort((one, other) => other.changed - one.changed);
}

/** Return the conversation that this tab showed last, or else the one that changed last. */
export function lastOpen() {
  const found = conversations();
  return found.find(({ id }) => id === sessionStorage.getItem("edgespec.open")) ?? found[0] ?? newConversation();
}

export const keepOpen = ({ id }) => sessionStorage.setItem("edgespec.open", id);

/** Keep a conversation; one without a word goes. Returns whether the browser had room for it. */
export function keep(conversation) {
  conversation.changed = Date.now();
  if (conversation.messages.length || conversation.draft) return write(PREFIX + conversation.id, conversation);
  forget(conversation);
  return true;
}

export function forget(conversation) {
  localStorage.removeItem(PREFIX + conversation.id);
}

export const saved = (id) => localStorage.getItem(PREFIX + id);

/** Undo `keep`: put back what was saved of a conversation, or nothing. */
export function putBack(id, text) {
  localStorage.removeItem(PREFIX + id); // first: there may be no room for both
  if (text !== null) localStorage.setItem(PREFIX + id, text);
}

/** Call `act` with each conversation that another tab has changed, or null for one that it deleted. */
export function onOtherTab(act) {
  window.addEventListener("storage", ({ key, newValue }) => {
    if (!key?.startsWith(PREFIX)) return;
    const found = newValue && read(key, null);
    act(found && linked(found));
  });
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export const settings = read("edgespec.settings", {});
export const keepSettings = () => write("edgespec.settings", settings);
export const theme = () => localStorage.getItem("edgespec.theme");
export const keepTheme = (name) => localStorage.setItem("edgespec.theme", name);
export const key = () => sessionStorage.getItem("edgespec.key") ?? ""; // gone with the tab
export const keepKey = (value) => sessionStorage.setItem("edgespec.key", value);
