// The conversation that is shown: what can be done with it and its messages, and the answer that comes.

import { begin, end, take } from "./answering.js";
import { answer } from "./ask.js";
import { add, adopt, choose, drop, parentOf, path, siblings } from "./branches.js";
import { showList as showListOf, titleOf } from "./list.js";
import { at, fit, make, notice, say, toggleSide } from "./make.js";
import { messageView } from "./message.js";
import { hasPictures, putBack, taken } from "./pictures.js";
import { bodyOf } from "./sampling.js";
import * as store from "./store.js";
import { exportAs, importFrom } from "./transfer.js";

const DRAWING_MS = 100; // between drawings of an answer that comes
const KEEPING_MS = 1000;
const DRAFT_MS = 300; // without a key, after which a draft is kept
let conversation = store.lastOpen();
let running = null; // what stops the answer that is coming
let draftTimer = 0;

// Showing

export const showList = () => showListOf(conversation, open);

export function showMessages() {
  const messages = path(conversation);
  const box = at("messages"), top = box.scrollTop, isHere = box.contains(document.activeElement);
  const views = messages.map((message, index) => messageView(message, {
    acts: acts(message, index === messages.length - 1),
    turns: turnsOf(message),
    editing: running ? null : editingOf(message),
  }));
  const empty = make("p", "empty", "Ask the model something. It runs on this server; nothing goes elsewhere.");
  box.replaceChildren(...(views.length ? views : [empty]));
  if (isHere) (box.querySelector(".editing textarea") ?? at("prompt")).focus(); // the button that was pressed is gone
  at("title").value = titleOf(conversation);
  document.title = `${titleOf(conversation)} · edgespec`;
  box.scrollTop = box.scrollHeight;
  return { views, scrollBack: () => (box.scrollTop = top) };
}

function acts(message, isLast) {
  if (message.isOpen) return {};
  const copy = { Copy: () => navigator.clipboard.writeText(message.content) };
  if (running) return message.role === "user" ? {} : copy;
  if (message.role === "user") {
    return { Edit: () => edit(message), ...(isLast ? { "Send again": () => ask(message) } : {}) };
  }
  const canGoOn = message.ending && message.content;
  return { ...copy, ...(isLast && canGoOn ? { Continue: () => goOn(message) } : {}), Regenerate: () => regenerate(message) };
}

function turnsOf(message) {
  const all = siblings(conversation, message), number = all.indexOf(message);
  if (all.length < 2 || running) return null;
  const show = (index) => {
    choose(conversation, all[index]);
    keep();
    const { views, scrollBack } = showMessages();
    scrollBack();
    const view = views[path(conversation).indexOf(all[index])];
    view.scrollIntoView({ block: "nearest" });
    view.querySelector(`[aria-label="${index < number ? "Earlier" : "Later"} version"]:enabled, .versions :enabled`)?.focus();
  };
  return { number, count: all.length, show };
}

export function showRunning() {
  at("send").hidden = Boolean(running);
  at("stop").hidden = !running;
}

// Conversations

export function open(one, message = null) {
  if (running && one.id !== conversation.id) stop();
  if (one.id !== conversation.id) {
    keepDraft();
    conversation = one;
  }
  const found = message && conversation.messages.find(({ id }) => id === message.id);
  if (found && !running) choose(conversation, found);
  begun();
  notice("");
  toggleSide(false);
  showList();
  const { views } = showMessages();
  if (found) views[path(conversation).indexOf(found)]?.scrollIntoView();
  at("prompt").focus();
}

/** Begin with a conversation: an answer that was coming when the page was closed comes no more. */
export function begun() {
  store.keepOpen(conversation);
  if (!running) {
    for (const message of conversation.messages.filter(({ isOpen }) => isOpen)) {
      end(message, "broken off");
      if (!message.content && !message.reasoning) drop(conversation, message);
    }
  }
  at("prompt").value = conversation.draft ?? "";
  fit(at("prompt"));
}

export function keep(one = conversation) {
  if (one.isGone || store.keep(one)) return;
  notice("This browser has no more room. Export or delete a conversation.");
}

/** Keep what stands in the field. */
export function keepDraft() {
  const isDue = draftTimer || (conversation.draft ?? "") !== at("prompt").value;
  clearTimeout(draftTimer);
  draftTimer = 0;
  conversation.draft = at("prompt").value;
  if (isDue) keep();
}

export function keepSoon() {
  clearTimeout(draftTimer);
  draftTimer = setTimeout(keepDraft, DRAFT_MS);
}

/** Show what another tab has changed; `other` is null for what it deleted. */
export function heard(other) {
  if (other?.id === conversation.id && adopt(conversation, other) && !running) showMessages().scrollBack();
  showList();
}

export function exportIt() {
  exportAs(titleOf(conversation), [conversation]);
}

export function rename(title) {
  conversation.title = title.trim();
  keep();
  showList();
}

export function remove() {
  if (!confirm(`Delete “${titleOf(conversation)}”?`)) return;
  conversation.isGone = true; // an answer that is still coming must not keep it
  store.forget(conversation);
  at("prompt").value = conversation.draft = "";
  open(store.conversations()[0] ?? store.newConversation());
}

export async function takeIn(files) {
  keepDraft();
  const [found, words] = await importFrom(files);
  if (found && found.id === conversation.id) adopt(conversation, found);
  if (found) open(found);
  notice(words, found || words.includes("here already") ? "news" : "notice");
}

// Asking

export function send() {
  const text = at("prompt").value;
  if (!(text.trim() || hasPictures()) || running) return;
  const message = add(conversation, path(conversation).at(-1) ?? null, { role: "user", content: text, ...taken() });
  const asked = conversation;
  at("prompt").value = conversation.draft = "";
  fit(at("prompt"));
  ask(message, { onFailure: () => backToField(asked, message) });
}

/** Take back a message that failed: it stands in the field again, before what was typed since. */
function backToField(asked, message) {
  if (asked === conversation) asked.draft = at("prompt").value;
  drop(asked, message);
  asked.draft = [message.content, asked.draft].filter(Boolean).join("\n\n");
  putBack(message.images);
  if (asked !== conversation) return;
  at("prompt").value = asked.draft;
  fit(at("prompt"));
}

function edit(message) {
  message.edit = message.content;
  const { views, scrollBack } = showMessages();
  scrollBack();
  views[path(conversation).indexOf(message)].querySelector("textarea").focus();
}

function editingOf(message) {
  return {
    onInput: (text) => {
      message.edit = text;
      keepSoon();
    },
    onCancel: () => {
      delete message.edit;
      keep();
      showMessages().scrollBack();
    },
    onDone: (text) => {
      const edited = add(conversation, parentOf(conversation, message), { ...message.images && { images: message.images }, role: "user", content: text });
      const asked = conversation;
      delete message.edit;
      ask(edited, { onFailure: () => {
        drop(asked, edited);
        choose(asked, message);
        message.edit = text;
      } });
    },
  };
}

function regenerate(message) {
  const asked = conversation, showEarlier = () => choose(asked, message);
  ask(parentOf(conversation, message), { onFailure: showEarlier, onNothing: showEarlier });
}

function goOn(message) {
  ask(parentOf(conversation, message), { said: message });
}

/**
 * Ask for an answer to a message, or for more of the answer `said`. Where nothing comes, `onNothing` is called if that
 * was wanted, and `onFailure` if it was not.
 */
async function ask(question, { said = null, onNothing = () => {}, onFailure = () => {} } = {}) {
  if (running) return;
  const asked = conversation, goesOn = Boolean(said), stopping = new AbortController();
  if (question) choose(asked, said ?? question);
  const before = path(asked);
  const until = before.slice(0, before.indexOf(said ?? question) + 1);
  const body = bodyOf(until, { goesOn });
  const length = goesOn ? said.content.length : 0, endedBy = said?.ending;
  said ??= add(asked, question, { role: "assistant", content: "", reasoning: "" });
  begin(said);
  running = stopping;
  notice("");
  keep();
  showList();
  showRunning();
  say("The answer is coming.");
  showMessages();
  let drawn = 0, kept = performance.now(), error = null;
  try {
    for await (const event of answer(body, stopping.signal)) {
      take(said, event);
      const now = performance.now();
      if (now - drawn > DRAWING_MS) {
        drawn = now;
        if (asked === conversation) draw();
      }
      if (now - kept > KEEPING_MS) {
        kept = now;
        keep(asked);
      }
    }
    end(said);
    say(`The answer is complete: ${said.timings?.predicted_n ?? 0} tokens.`);
  } catch (thrown) {
    error = thrown;
    const isStopped = error.name === "AbortError";
    const isSame = goesOn && said.content.length === length; // nothing more came
    end(said, isSame ? endedBy : isStopped ? "stopped" : "broken off");
    if (isStopped) say("Stopped.");
    const isEmpty = !said.content && !said.reasoning;
    if (isEmpty) drop(asked, said);
    if (isEmpty) (isStopped ? onNothing : onFailure)();
  }
  keep(asked);
  if (running === stopping) running = null;
  showRunning();
  showList();
  if (asked === conversation) showEnd(error);
  else showMessages();
}

/** Show the messages after an answer; who reads above is left there. */
function showEnd(error) {
  const isAtEnd = readsEnd(), hasThoughts = at("messages").querySelector("article:last-child .thoughts[open]");
  const { views, scrollBack } = showMessages();
  if (!isAtEnd) scrollBack();
  const thoughts = views.at(-1)?.querySelector(".thoughts");
  if (thoughts) thoughts.open = Boolean(hasThoughts);
  if (!error || error.name === "AbortError") return;
  notice(error.message);
  if (error.status === 401) at("settings").showModal(), at("key").focus();
}

function readsEnd() {
  const box = at("messages");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 80;
}

function draw() {
  const box = at("messages");
  const isAtEnd = readsEnd();
  box.lastElementChild.fill();
  if (isAtEnd) box.scrollTop = box.scrollHeight;
}

export function stop() {
  running?.abort();
}
