"""How the command line spells the names in the library's messages: settings as flags, acts on a chat as its commands.

The library puts names into backticks as Python has them: `size`, or `size=9` with a value.
"""

import re
from collections.abc import Mapping

from edgespec.errors import EdgespecError

ALIKE = (
    "acceptance", "alignment_weight", "allow_origin", "api_key_file", "branching", "chat_template", "classifier",
    "confidence", "device", "draft_quant", "draft_revision", "draft_tokens", "draw", "dtype", "exact", "experts",
    "fork", "frequency_penalty", "grammar", "host", "json_schema", "learning_rate", "logit_bias", "logprobs", "lookup",
    "max_new_tokens", "max_waiting", "min_p", "parallel", "policy", "port", "presence_penalty", "prompt_cache",
    "quant", "reasoning_budget", "reasoning_budget_message",
    "resources", "revision", "seed", "stop_depths", "stop_gain", "stop_model", "target_width", "threads",
    "slots_dir", "tokenizer", "top_groups", "top_k", "top_p", "tree_file", "workers",
)  # fmt: skip
FLAGS = {name: "--" + name.replace("_", "-") for name in ALIKE} | {
    "adapters": "--lora",
    "context_tokens": "--ctx-size",
    "depth": "--tree-depth",
    "draft": "-md",
    "draft_adapters": "--lora-draft",
    "draft_check": "--draft-check",
    "draft_temperature": "--draft-temp",
    "ignore_eos=True": "--ignore-eos",
    "local_files_only=False": "--online",
    "max_children": "--tree-width",
    "max_gpu_bytes": "--max-gpu-mem",
    "num_groups": "--groups",
    "prompt_logprobs": "--echo-logprobs",
    "raw=True": "--raw",
    "repetition_penalty": "--repeat-penalty",
    "self_check=False": "--no-self-check",
    "size": "--tree-size",
    "stop_log_probability": "--stop-logprob",
    "target": "-m",
    "temperature": "--temp",
    "template_args": "--template-arg",
    "threshold": "--tree-threshold",
}
COMMANDS = {
    "all_profiles": "edgespec profile --list",
    "clear": "/clear",
    "compact": "/compact",
    "regenerate": "/regen",
    "save": "/save",
    "save(overwrite=True)": "/save! FILE",
}
SPELLINGS = {**FLAGS, **COMMANDS}
_IN_BACKTICKS = re.compile("`([^`]+)`")


def spelled(text: str, spellings: Mapping[str, str] = SPELLINGS) -> str:
    """The text with the names in backticks spelled so, `size=9` as --tree-size 9; others stay as they are."""

    def spell(found: re.Match[str]) -> str:
        words = []
        for setting in found[1].split(", "):
            name, _, value = setting.partition("=")
            if setting in spellings:
                words.append(spellings[setting])
            elif name in spellings and value:
                words.append(f"{spellings[name]} {value}")
            else:
                return found[0]
        return " ".join(words)

    return _IN_BACKTICKS.sub(spell, text)


def spelled_error(error: EdgespecError) -> EdgespecError:
    """The error as the command line says it."""
    return EdgespecError(error.code, spelled(error.what), spelled(error.fix))
