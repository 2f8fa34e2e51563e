"""What rows, options and template ask for and a run does not do, said once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.cli.console import Console
from edgespec.cli.generate.options import PromptOptions
from edgespec.cli.prompts.notes import template_notes
from edgespec.cli.prompts.report import say_unused_keys
from edgespec.cli.prompts.rows import PromptRow
from edgespec.text.day import asks_for_day

if TYPE_CHECKING:
    from edgespec.pair.pair import ModelPair


def report_ignored_settings(console: Console, pair: ModelPair, rows: list[PromptRow], options: PromptOptions) -> None:
    """Say once what rows, model or template ask for and this run does not do."""
    say_unused_keys(console, rows)
    if options.day is not None and (options.raw or not asks_for_day(pair.tokenizer)):
        console.say("--day changes nothing: no chat template asks for it")
    names = {*pair.template_args, *(name for row in rows for name in row.settings.template_args or ())}
    if pair.tokenizer.chat_template and not options.raw:
        for note in template_notes(pair, names, has_system=any(row.has_system for row in rows) or bool(options.system)):
            console.say(note)
    elif names:
        console.say(f"not applied without a chat template: {', '.join(sorted(names))}")
    if not pair.tokenizer.chat_template and not options.raw:
        has_several = any(len(row.messages) > 1 or row.follow_ups or row.settings.system for row in rows)
        how = ", each message on a line of its own" if has_several or options.system else ""
        console.say(f"no chat template: prompts are read as they are{how}")
