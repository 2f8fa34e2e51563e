// What the page's buttons and keys do.

import { models, properties } from "./ask.js";
import * as chat from "./chat.js";
import { at, fit, keys, notice, toggleSide } from "./make.js";
import { bindPictures } from "./pictures.js";
import { bindSettings, showDefaults, showModels } from "./sampling.js";
import * as store from "./store.js";
import { exportAs } from "./transfer.js";

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  store.keepTheme(name);
}

async function showModel() {
  try {
    const { model, placement, sampling } = await properties();
    const { layers, resident_layers: resident } = placement;
    at("model").textContent = resident < layers ? `${model} · ${resident} of ${layers} layers stay` : model;
    showDefaults(sampling);
    showModels(await models());
    notice("");
  } catch (error) {
    notice(error.message);
    if (error.status === 401 && !at("settings").open) at("settings").showModal(), at("key").focus();
  }
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  chat.send();
});
at("prompt").addEventListener("keydown", (event) => keys(event, chat.send, chat.stop));
at("prompt").addEventListener("input", () => {
  fit(at("prompt"));
  chat.keepSoon();
});
window.addEventListener("pagehide", chat.keepDraft);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || at("settings").open) return;
  chat.stop();
  toggleSide(false);
  at("more").open = false;
});
at("stop").addEventListener("click", () => {
  chat.stop();
  at("prompt").focus();
});
at("new").addEventListener("click", () => chat.open(store.newConversation()));
at("menu").addEventListener("click", () => toggleSide(!document.body.classList.contains("side-open")));
at("search").addEventListener("input", chat.showList);
at("search").addEventListener("keydown", (event) => keys(event, () => at("list").querySelector("button")?.click(), () => {
  at("search").value = "";
  chat.showList();
}));
at("export").addEventListener("click", chat.exportIt);
at("export-all").addEventListener("click", () => {
  chat.keepDraft();
  exportAs("edgespec conversations", store.conversations());
});
at("import").addEventListener("click", () => at("files").click());
at("files").addEventListener("change", async () => {
  await chat.takeIn([...at("files").files]);
  at("files").value = ""; // so that the same file can be chosen again
});
at("remove").addEventListener("click", chat.remove);
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
at("title").addEventListener("change", () => chat.rename(at("title").value));
at("more").addEventListener("click", (event) => {
  if (event.target.tagName === "BUTTON") at("more").open = false;
});

if (store.theme()) setTheme(store.theme());
at("key").value = store.key();
bindSettings(chat.showMessages);
bindPictures();
store.onOtherTab(chat.heard);
chat.begun();
chat.showList();
chat.showMessages();
chat.showRunning();
showModel();
if (matchMedia("(min-width: 48rem)").matches) at("prompt").focus(); // on a phone its keyboard would cover the page
