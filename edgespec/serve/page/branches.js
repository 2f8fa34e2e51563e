// A conversation's messages are a tree: what is edited or answered anew begins a branch, and the earlier one stays.
// Each message names the one that it follows; `next` is the one that is shown after it.

export const newId = () => crypto.getRandomValues(new Uint32Array(3)).join("-");

/** Let a conversation of the earlier shape, a list, be a tree without branches. */
export function linked(conversation) {
  let before = null;
  for (const message of conversation.messages) {
    message.id ??= newId();
    if (message.parent === undefined) message.parent = before;
    before = message.id;
  }
  return conversation;
}

/** Return the messages that are shown, from the first on. */
export function path(conversation) {
  const found = [];
  const after = (one) => {
    const all = conversation.messages.filter(({ parent }) => parent === (one === conversation ? null : one.id));
    return all.find(({ id }) => id === one.next) ?? all.at(-1);
  };
  for (let one = after(conversation); one; one = after(one)) found.push(one);
  return found;
}

export const siblings = (conversation, { parent }) => conversation.messages.filter((one) => one.parent === parent);
export const parentOf = (conversation, { parent }) => conversation.messages.find(({ id }) => id === parent) ?? null;

/** Add a message after `parent` (null: the first), and show it. */
export function add(conversation, parent, fields) {
  const message = { id: newId(), parent: parent?.id ?? null, ...fields };
  conversation.messages.push(message);
  choose(conversation, message);
  return message;
}

/** Take back a message that nothing follows. */
export function drop(conversation, message) {
  conversation.messages = conversation.messages.filter((one) => one !== message);
}

/** Show the branch of a message. */
export function choose(conversation, message) {
  for (let one = message; one; one = parentOf(conversation, one)) (parentOf(conversation, one) ?? conversation).next = one.id;
}

/** Take over what `other`, a copy of the same conversation, has more; returns whether it had anything. */
export function adopt(conversation, other) {
  let count = 0;
  for (const message of other.messages) {
    const own = conversation.messages.find(({ id }) => id === message.id);
    if (message.isOpen || own?.isOpen) continue; // it is still being written
    if (!own) conversation.messages.push(message);
    else if (own.content.length < message.content.length) Object.assign(own, message);
    else continue;
    count += 1;
  }
  return count > 0;
}
