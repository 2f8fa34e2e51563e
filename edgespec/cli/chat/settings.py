"""Settings that `/set` changes: their names, their values now, and how a text sets each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from edgespec.cli.chat.parse import closest
from edgespec.cli.spelling import spelled
from edgespec.config import MAX_SEED, SamplingSettings, require
from edgespec.errors import EdgespecError
from edgespec.hub.adapter_names import SCALED
from edgespec.text.context import check_length
from edgespec.tree.policies import POLICIES
from edgespec.tree.settings import TreeSettings

if TYPE_CHECKING:
    from edgespec.cli.chat.state import Chat

ALIASES = {"temp": "temperature", "n": "max_new_tokens", "max_tokens": "max_new_tokens", "n_predict": "max_new_tokens",
           "repeat_penalty": "repetition_penalty"}  # fmt: skip
SWITCH = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
SPECS = ("off", "tree", "chain")
THINKING = "enable_thinking"  # what templates of models that think read


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSetting:
    """A setting that `/set` changes."""

    hint: str  # what it takes
    get: Callable[[Chat], Any]
    change: Callable[[Chat, str], None]  # raises EdgespecError


def show_settings(chat: Chat) -> list[str]:
    """Return a line for each setting, with its value and what it takes."""
    return [f"{name:<20}{_shown(setting.get(chat)):<12}{setting.hint}" for name, setting in SETTINGS.items()]


def saved_settings(chat: Chat) -> dict[str, Any]:
    """Return the values of all settings, for a session's file."""
    return {name: setting.get(chat) for name, setting in SETTINGS.items()}


def change_settings(chat: Chat, argument: str) -> list[str]:
    """Change the settings of a line `k v` or `k=v k=v`, and return what changed; if one is refused, none changes."""
    pairs = _pairs(argument)
    for name, _ in pairs:
        if name not in SETTINGS:
            near = closest(name, SETTINGS)
            fix = f"Did you mean {near}?" if near else f"Choose one of: {', '.join(SETTINGS)}."
            raise EdgespecError("E_SETTING", f"there is no setting '{name}'.", fix)
    conversation = chat.conversation
    before = (
        conversation.options.copy(),
        conversation.template_values.copy(),
        chat.engine.pinned_tree,
        chat.shows_stats,
    )
    lines = []
    try:
        for name, value in pairs:
            old = SETTINGS[name].get(chat)
            SETTINGS[name].change(chat, value)
            lines.append(f"{name}: {_shown(old)} → {_shown(SETTINGS[name].get(chat))}")
    except EdgespecError:
        conversation.options, conversation.template_values, tree, chat.shows_stats = before
        chat.engine.use_tree(tree)
        raise
    return lines


def restore_settings(chat: Chat, saved: Mapping[str, Any]) -> list[str]:
    """Restore the settings of a session, and return a line for each that cannot be set."""
    lines = []
    for name, value in saved.items():
        if name not in SETTINGS:
            lines.append(f"not applied: {name}, which is no setting here")
            continue
        text = _shown(value) if value is not None else "random" if name == "seed" else "auto"
        try:
            if SETTINGS[name].get(chat) != value:
                SETTINGS[name].change(chat, text)
        except EdgespecError as error:
            lines.append(f"not applied: {name} {text} ({spelled(error.what)})")
    return lines


def use_spec(chat: Chat, spec: str) -> None:
    """Choose how to speculate from the next answer on; `on` is how the chat began. Raises EdgespecError."""
    if spec == "on":
        spec = "chain" if chat.own_tree.policy == "chain" else "tree"
    require(spec in SPECS, f"'{spec}' is no way to speculate.", f"Choose one of: {', '.join(SPECS)}.")
    own = chat.own_tree
    if spec == "off":
        chat.engine.use_tree(own.plain())
    elif spec == "tree":
        chat.engine.use_tree(TreeSettings() if own.policy in {"chain", "none"} else None)
    else:
        chat.engine.use_tree(None if own.policy == "chain" else TreeSettings(policy="chain"))


def use_tree_size(chat: Chat, text: str) -> None:
    """Use trees, or a chain, of this number of nodes; `auto` is what the chat began with. Raises EdgespecError."""
    tree = chat.engine.tree if chat.spec != "off" else chat.own_tree
    if text == "auto":
        chat.engine.use_tree(None)
        return
    size, budget = _number(text, int), POLICIES[tree.policy].budget
    if budget is None:
        what = f"--policy {tree.policy} has a shape of its own, and no size to set."
        raise EdgespecError("E_SETTING", what, "Use /spec chain or off.")
    changed: dict[str, Any] = {budget: size}
    chat.engine.use_tree(replace(tree, **changed))


def use_adapters(chat: Chat, text: str) -> None:
    """Choose adapters by `NAME[:SCALE],...` from the next answer on, none, or as they were given.

    Raises EdgespecError.
    """
    from edgespec.pair.adapters import chosen_use

    given, options = chat.engine.pair.target.adapters, chat.conversation.options
    names = {word: one.name for one in given for word in (one.name.lower(), one.name)}
    if text in {"auto", "none"} and text not in names:
        options.pop("adapters", None)
        options |= {} if text == "auto" else {"adapters": []}
        return
    chosen: list[str | tuple[str, float]] = []
    for word in text.replace(",", " ").split():
        scaled = None if word in names else SCALED.fullmatch(word)
        name = scaled[1] if scaled else word
        chosen.append((names.get(name, name), float(scaled[2])) if scaled else names.get(name, name))
    chosen_use(given, chosen)
    options["adapters"] = chosen


def adapters_in_words(chat: Chat) -> str | None:
    """Return the adapters that were chosen as `use_adapters` takes them; None where those that were given count."""
    chosen = chat.conversation.options.get("adapters")
    if chosen is None:
        return None
    return ",".join(one if isinstance(one, str) else f"{one[0]}:{one[1]:g}" for one in chosen) or "none"


def _use_depth(chat: Chat, text: str) -> None:
    tree = chat.engine.tree
    require(tree.uses("depth"), f"--policy {tree.policy} has no depth to set.", "Use /spec tree first.")
    depth = chat.own_tree.depth if text == "auto" else _number(text, int)
    chat.engine.use_tree(replace(tree, depth=depth))


def _sampling(chat: Chat) -> SamplingSettings:
    return chat.conversation.options.get("sampling") or chat.engine.pair.default_sampling()


def _sampling_setting(name: str, kind: type[int] | type[float], hint: str) -> ChatSetting:
    def change(chat: Chat, text: str) -> None:
        changed: dict[str, Any] = {name: _number(text, kind)}
        chat.conversation.options["sampling"] = replace(_sampling(chat), **changed)

    return ChatSetting(hint=hint, get=lambda chat: getattr(_sampling(chat), name), change=change)


def _change_length(chat: Chat, text: str) -> None:
    length = _number(text, int)
    check_length(length)
    chat.conversation.options["max_new_tokens"] = length


def _change_seed(chat: Chat, text: str) -> None:
    seed = None if text in {"random", "none", "-1"} else _number(text, int)
    require(seed is None or 0 <= seed <= MAX_SEED, f"{seed} is no seed.", "Use a number from 0 on, or random.")
    chat.conversation.options["seed"] = seed


def _change_thinking(chat: Chat, text: str) -> None:
    values = chat.conversation.template_values
    if text == "auto":
        values.pop(THINKING, None)
        return
    value = _switched(text, "on, off or auto")
    if chat.conversation.is_raw or THINKING not in str(chat.engine.pair.tokenizer.chat_template):
        what = "there is no chat template" if chat.conversation.is_raw else f"the chat template reads no {THINKING}"
        raise EdgespecError("E_SETTING", f"{what}: thinking cannot be switched.", "Leave it out.")
    values[THINKING] = value


def _change_stats(chat: Chat, text: str) -> None:
    chat.shows_stats = _switched(text, "on or off")


def _switched(text: str, choices: str) -> bool:
    require(text in SWITCH, f"'{text}' is not {choices}.", "Use one of them.")
    return SWITCH[text]


SETTINGS = {
    "temperature": _sampling_setting("temperature", float, "0 is greedy"),
    "top_p": _sampling_setting("top_p", float, "keep the likeliest tokens of this mass; 1 keeps all"),
    "top_k": _sampling_setting("top_k", int, "keep the k likeliest tokens; 0 keeps all"),
    "min_p": _sampling_setting("min_p", float, "drop tokens below this share of the likeliest; 0 keeps all"),
    "repetition_penalty": _sampling_setting(
        "repetition_penalty", float, "of tokens in prompt and text; above 1 they come less, 1 is none"
    ),
    "presence_penalty": _sampling_setting("presence_penalty", float, "of tokens in the answer, -2 to 2; 0 is none"),
    "frequency_penalty": _sampling_setting(
        "frequency_penalty", float, "the same for each time that they stand there; 0 is none"
    ),
    "seed": ChatSetting(
        hint="of the draws: a number, or random", get=lambda chat: chat.conversation.options.get("seed"),
        change=_change_seed,
    ),
    "max_new_tokens": ChatSetting(
        hint="of an answer; -1 to the end of the context",
        get=lambda chat: chat.conversation.options.get("max_new_tokens"), change=_change_length,
    ),
    "spec": ChatSetting(hint="off, tree or chain", get=lambda chat: chat.spec, change=use_spec),
    "tree_size": ChatSetting(
        hint="nodes of a tree, tokens of a chain, or auto",
        get=lambda chat: "auto" if chat.engine.is_tuned else chat.engine.tree.num_nodes or None, change=use_tree_size,
    ),
    "tree_depth": ChatSetting(
        hint="layers of a tree, or auto", get=lambda chat: chat.engine.tree.num_layers or None, change=_use_depth
    ),
    "think": ChatSetting(
        hint="where the chat template can switch it: on, off or auto",
        get=lambda chat: chat.conversation.template_values.get(THINKING), change=_change_thinking,
    ),
    "adapters": ChatSetting(
        hint="NAME[:SCALE],... of those given with --lora, none, or auto", get=adapters_in_words, change=use_adapters
    ),
    "stats": ChatSetting(hint="a line below every answer: on or off", get=lambda chat: chat.shows_stats,
                     change=_change_stats),
}  # fmt: skip


def _pairs(argument: str) -> list[tuple[str, str]]:
    """Return the names and values of a line; raises EdgespecError for a name without a value."""
    words = argument.replace("=", " = ").split()
    if "=" not in words:
        words = [words[0], "=", *words[1:]] if words else []
    pairs = []
    while words:
        if len(words) < 3 or words[1] != "=" or words[2] == "=":
            raise EdgespecError(
                "E_SETTING", f"'{words[0]}' has no value.", "Write /set temperature 0.7 or /set top_p=0.9."
            )
        name = words[0].lower().lstrip("-").replace("-", "_")
        pairs.append((ALIASES.get(name, name), words[2].lower()))
        del words[:3]
    return pairs


def _number(text: str, kind: type[int] | type[float]) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        what = "a whole number" if kind is int else "a number"
        raise EdgespecError("E_SETTING", f"'{text}' is not {what}.", "Write one.") from error


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "-" if value is None else str(value)
