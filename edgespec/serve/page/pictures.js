// Pictures of the message that is being written: chosen, dropped or pasted, shown small, and sent as what their files hold.

import { at, button, make, notice } from "./make.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MOST = 16, MOST_BYTES = 10 * 2 ** 20; // of a request and of a picture, as the server has it
const MOST_CHARACTERS = 11 * 2 ** 20; // of all of a message, so that its request fits
let chosen = []; // addresses with data

/** Let pictures be chosen, dropped anywhere, and pasted. */
export function bindPictures() {
  at("picture").addEventListener("click", () => at("pictures").click());
  at("pictures").addEventListener("change", async () => {
    await take([...at("pictures").files]);
    at("pictures").value = ""; // so that the same file can be chosen again
  });
  at("prompt").addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    if (!files.length) return;
    event.preventDefault();
    take(files);
  });
  document.addEventListener("dragover", (event) => {
    if (event.dataTransfer.types.includes("Files")) event.preventDefault();
  });
  document.addEventListener("drop", (event) => {
    if (!event.dataTransfer.files.length) return;
    event.preventDefault(); // else the browser would leave the page
    take([...event.dataTransfer.files]);
  });
}

/** Take files in; says which are none, and why. */
export async function take(files) {
  const wrong = [];
  for (const file of files) {
    const why = whyNot(file) ?? (await added(file));
    if (why) wrong.push(`“${file.name}” ${why}`);
  }
  notice(wrong.join(" "));
  show();
  at("prompt").focus();
}

function whyNot(file) {
  if (!KINDS.includes(file.type)) return "is no PNG, JPEG, WEBP or GIF.";
  if (file.size > MOST_BYTES) return `has ${(file.size / 2 ** 20).toFixed(1)} MiB, and 10 may be.`;
  if (chosen.length >= MOST) return `is one too many: ${MOST} pictures may be.`;
  return null;
}

async function added(file) {
  const address = await new Promise((resolve) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => resolve(null));
    reader.readAsDataURL(file);
  });
  if (address === null) return "cannot be read.";
  const length = [...chosen, address].reduce((sum, one) => sum + one.length, 0);
  if (length > MOST_CHARACTERS) return "is too large beside the others. Send them in several messages.";
  chosen.push(address);
  return null;
}

export const hasPictures = () => chosen.length > 0;

/** Return the pictures that were chosen, as a message's field, and begin with none. */
export function taken() {
  const found = chosen;
  show((chosen = []));
  return found.length ? { images: found } : {};
}

/** Put pictures back that could not be sent, before those that were chosen since. */
export function putBack(images = []) {
  chosen = [...images, ...chosen].slice(0, MOST);
  show();
}

function show() {
  const items = chosen.map((address, index) => {
    const item = make("li");
    const remove = button("×", () => {
      chosen.splice(index, 1);
      show();
      at("prompt").focus();
    });
    remove.setAttribute("aria-label", `Remove picture ${index + 1}`);
    item.append(thumbnail(address, index), remove);
    return item;
  });
  at("attached").replaceChildren(...items);
  at("attached").hidden = !items.length;
}

/** Return a message's pictures as they are shown above its words. */
export function shownPictures(images) {
  const frame = make("div", "pictures");
  frame.append(...images.map(thumbnail));
  return frame;
}

function thumbnail(address, index) {
  const image = make("img");
  image.src = address;
  image.alt = `Picture ${index + 1}`;
  return image;
}

/** Return a message's content as the server takes it: parts where it has pictures. */
export function contentOf({ content, images }) {
  if (!images?.length) return content;
  const pictures = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return [...pictures, ...(content ? [{ type: "text", text: content }] : [])];
}
