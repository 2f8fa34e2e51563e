"""Help in sections: first what most people need, last what few do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

FIRST = "Options"
MODELS = ("revision", "draft_revision", "online", "config")
SAMPLING = (
    "greedy", "top_k", "top_p", "min_p", "stop", "ignore_eos", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "json_schema", "grammar",
)  # fmt: skip
MACHINE = (
    "max_cpu_mem", "gpu_margin", "resident_layers", "experts", "ctx_size", "parallel", "quant", "draft_quant", "device",
    "dtype", "threads", "prompt_cache",
)  # fmt: skip
MESSAGES = ("quiet", "verbose", "log_file")
ADVANCED = (
    "policy", "size", "depth", "max_children", "threshold", "draw", "draft_temperature", "profile", "acceptance",
    "branching", "fork", "draft_tokens", "tree_file", "stop_gain", "stop_depths", "stop_log_probability", "classifier",
    "stop_model", "confidence", "target_width", "cuda_graphs", "no_self_check",
)  # fmt: skip
LAST = {
    "Sampling": SAMPLING,
    "Models": MODELS,
    "Memory, device and formats": MACHINE,
    "Messages": MESSAGES,
    "Advanced (policies and shapes of trees)": ADVANCED,
}


class SectionedCommand(click.Command):
    """A command whose options stand in sections, by their parameters' names; what is in none stands in the first."""

    def __init__(self, *arguments: Any, sections: Mapping[str, Sequence[str]], examples: str, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.sections, self.examples = sections, examples

    def format_help_text(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the command does, and its examples before all options."""
        super().format_help_text(context, formatter)
        with formatter.section("Examples"):
            formatter.write("".join(f"  {line}\n" for line in self.examples.splitlines()))

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options with one long spelling each, and the other spellings below them."""
        options = {option.name: option for option in self.get_params(context) if isinstance(option, click.Option)}
        placed = {name for names in self.sections.values() for name in names}
        rest = [str(name) for name in options if name not in placed]
        for title, names in self.sections.items():
            shown = [options[name] for name in (*names, *(rest if title == FIRST else ())) if name in options]
            rows = [(_spelled(option, context), record[1]) for option in shown
                    if (record := option.get_help_record(context)) is not None]  # fmt: skip
            with formatter.section(title):
                formatter.write_dl(rows)
        others = [(long[0], ", ".join(long[1:])) for long in map(_long, options.values()) if len(long) > 1]
        if others:
            with formatter.section("Other spellings"):
                formatter.write_dl(others)


def _long(option: click.Option) -> list[str]:
    return [name for name in option.opts if name.startswith("--")]


def _spelled(option: click.Option, context: click.Context) -> str:
    """Return an option's short names, its first long one, that of its opposite, and what it takes."""
    long = _long(option)
    names = ", ".join([*(name for name in option.opts if name not in long), *long[:1]])
    opposite = f" / {option.secondary_opts[0]}" if option.secondary_opts else ""
    return names + opposite if option.is_flag else f"{names} {option.make_metavar(context)}"
