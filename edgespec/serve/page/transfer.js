// Conversations to a file and back. A file is a saved chat, which `edgespec chat` reads too, or a list of them.

import { adopt, linked, newId, path } from "./branches.js";
import { titleOf } from "./list.js";
import { make } from "./make.js";
import * as store from "./store.js";

const SCHEMA = "edgespec.session/1";

/** Save conversations to a file: one by itself, several as a list. */
export function exportAs(name, found) {
  const sessions = found.map(sessionOf);
  const content = JSON.stringify(sessions.length === 1 ? sessions[0] : sessions, null, 1);
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([content], { type: "application/json" }));
  link.download = `${name.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)}.json`;
  link.click();
  URL.revokeObjectURL(link.href);
}

/** Return the shown branch as a session's messages, and beside it all messages with what each follows. */
function sessionOf(one) {
  const shown = path(one);
  const words = ({ role, content, reasoning, images }) => ({
    role, content,
    ...(reasoning ? { reasoning_content: reasoning } : {}),
    ...(images?.length ? { images: images.map((data) => ({ data })) } : {}),
  });
  const interrupted = shown.flatMap(({ ending }, index) => (ending ? [index] : []));
  const all = one.messages.map(({ id, parent, ending, ...rest }) => ({ id, parent, ending, ...words(rest) }));
  const id = one.id, title = titleOf(one), end = shown.at(-1)?.id;
  return { schema: SCHEMA, id, title, messages: shown.map(words), interrupted, draft: one.draft, end, branches: all };
}

/** Take in the conversations of files; returns the one to open, if any, and what to say. Changes nothing where one is wrong. */
export async function importFrom(files) {
  const found = [];
  for (const file of files) {
    try {
      found.push(...conversationsOf(await file.text()));
    } catch (error) {
      return [null, `“${file.name}” was not imported: ${error.message}`];
    }
  }
  const here = store.conversations(), changed = [];
  for (const one of found) {
    const same = here.find((other) => other.id === one.id) ?? here.find((other) => isSame(other, one));
    if (!same) here.push(one);
    if (!same || (same.id === one.id && adopt(same, one))) changed.push(same ?? one);
  }
  const before = new Map(changed.map(({ id }) => [id, store.saved(id)]));
  if (!changed.every(store.keep)) {
    for (const [id, text] of before) store.putBack(id, text);
    return [null, "This browser has no room for them: nothing was imported. Delete a conversation first."];
  }
  const [added, known] = [changed.length, found.length - changed.length];
  const words = [`${added} ${added === 1 ? "conversation" : "conversations"} imported.`];
  if (known) words.push(`${known} ${known === 1 ? "was" : "were"} here already.`);
  if (found.some(({ system }) => system)) words.push("System messages are not imported: the settings have one for all.");
  return [changed[0] ?? null, words.join(" ")];
}

const isSame = (one, other) => wordsOf(one) === wordsOf(other);
const wordsOf = (one) => JSON.stringify(path(one).map(({ role, content }) => [role, content]));

/** Return the conversations of a file's text; throws an error that says what is wrong. */
function conversationsOf(text) {
  let content;
  try {
    content = JSON.parse(text);
  } catch {
    throw new Error("it is not JSON.");
  }
  const sessions = Array.isArray(content) ? content : [content];
  if (!sessions.length) throw new Error("it has no conversation.");
  return sessions.map((session, index) => conversationOf(session, sessions.length > 1 ? `conversation ${index + 1}` : "it"));
}

function conversationOf(session, name) {
  const isSession = session?.schema === SCHEMA && Array.isArray(session.messages);
  if (!isSession) throw new Error(`${name} is no conversation that this page or \`edgespec chat\` saved.`);
  const { id, title, draft, end, branches, interrupted, system } = session;
  const entries = branches === undefined ? session.messages : Array.isArray(branches) ? branches : [null];
  if (!entries.length && !draft) throw new Error(`${name} has no messages.`);
  const messages = entries.map((entry, index) => messageOf(entry, `message ${index + 1} of ${name}`));
  if (branches === undefined) {
    for (const index of Array.isArray(interrupted) ? interrupted : []) if (messages[index]) messages[index].ending = "stopped";
  } else {
    const seen = new Set([null]);
    for (const [index, message] of messages.entries()) {
      const { id, parent } = entries[index];
      if (!isWord(id) || seen.has(id) || !seen.has(parent)) throw new Error(`message ${index + 1} of ${name} follows none.`);
      seen.add(id);
      Object.assign(message, { id, parent });
    }
  }
  const words = { title: isWord(title) ? title.slice(0, 120) : "", draft: isWord(draft) ? draft : "" };
  const found = linked({ id: isWord(id) ? id : newId(), changed: Date.now(), ...words, messages });
  showTo(found, end);
  if (system) Object.defineProperty(found, "system", { value: true }); // said once, and not kept
  return found;
}

/** Let the branch be shown that a message ends. */
function showTo(conversation, end) {
  const byId = new Map(conversation.messages.map((message) => [message.id, message]));
  for (let one = byId.get(end); one; one = byId.get(one.parent)) (byId.get(one.parent) ?? conversation).next = one.id;
}

const isWord = (value) => typeof value === "string" && value !== "";

function messageOf(entry, name) {
  const { role, content, reasoning_content: reasoning, ending } = entry ?? {};
  if (entry?.tool_calls || role === "tool") throw new Error(`${name} is a call of a tool or its result, which this page cannot show.`);
  if (!["user", "assistant"].includes(role) || typeof content !== "string") throw new Error(`${name} has no role or no text.`);
  const images = Array.isArray(entry.images) ? entry.images.map((one) => one?.data) : [];
  const isData = (one) => isWord(one) && one.startsWith("data:image/");
  if (!images.every(isData)) throw new Error(`${name} has a picture of a file, which this page cannot read.`);
  return { role, content, ...(images.length ? { images } : {}), ...(isWord(reasoning) ? { reasoning } : {}), ...(isWord(ending) ? { ending } : {}) };
}
