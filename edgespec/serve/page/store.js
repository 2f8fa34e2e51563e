// Conversations, settings and the theme, kept in this browser; each conversation under a key of its own.

const PREFIX = "edgespec.conversation.";

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function newConversation() {
  return { id: crypto.getRandomValues(new Uint32Array(3)).join("-"), title: "", changed: Date.now(), messages: [] };
}

/** Return all conversations, the last changed first. */
export function conversations() {
  return Object.keys(localStorage)
    .filter((key) => key.startsWith(PREFIX))
    .map((key) => read(key, null))
    .filter((found) => found && Array.isArray(found.messages))
    .sort((one, other) => other.changed - one.changed);
}

/** Keep a conversation; returns whether the browser had room for it. */
export function keep(conversation) {
  conversation.changed = Date.now();
  return write(PREFIX + conversation.id, conversation);
}

export function forget(conversation) {
  localStorage.removeItem(PREFIX + conversation.id);
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
