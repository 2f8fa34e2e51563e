// The settings' form, and the fields of a request that it sets.

import { contentOf } from "./pictures.js";
import { keepSettings, settings } from "./store.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"];
const field = (name) => document.getElementById(name);
let known = []; // models that a request may ask for

/** Show the settings in their fields, and keep them as they are changed. */
export function bindSettings(onChange) {
  for (const name of [...NUMBERS, "system"]) {
    field(name).value = settings[name] ?? "";
    field(name).addEventListener("change", () => {
      settings[name] = field(name).value;
      keepSettings();
    });
  }
  field("of_model").addEventListener("change", () => {
    settings.model = field("of_model").value;
    keepSettings();
  });
  field("foreseen").checked = Boolean(settings.foreseen);
  field("foreseen").addEventListener("change", () => {
    settings.foreseen = field("foreseen").checked;
    keepSettings();
    onChange();
  });
}

/** Return the body of a request for an answer to messages, or for more of the last one. */
export function bodyOf(messages, { goesOn = false } = {}) {
  const set = NUMBERS.filter((name) => (settings[name] ?? "") !== "");
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  return {
    messages: [...system, ...messages.map((message) => ({ role: message.role, content: contentOf(message) }))],
    ...(known.includes(settings.model) ? { model: settings.model } : {}),
    ...Object.fromEntries(set.map((name) => [name, Number(settings[name])])),
    ...(goesOn ? { continue_final_message: true, add_generation_prompt: false } : {}),
  };
}

/** Offer these models, if there are several; the first one is the base. */
export function showModels(names) {
  known = names.length > 1 ? names : [];
  field("chosen").hidden = !known.length;
  field("of_model").replaceChildren(...known.map((name) => new Option(name, name)));
  field("of_model").value = known.includes(settings.model) ? settings.model : names[0];
}

/** Show which values hold where a field is empty, as far as the server says so. */
export function showDefaults(sampling) {
  for (const name of ["temperature", "top_p", "top_k", "min_p"]) {
    const value = sampling?.[name];
    field(name).placeholder = typeof value === "number" ? `${Number(value.toPrecision(4))} by default` : "model's own";
  }
}
