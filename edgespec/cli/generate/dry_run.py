"""`generate --dry-run`: the memory plan, and how long it may take by the pair's profile."""

from __future__ import annotations

from edgespec.cli.console import Console
from edgespec.cli.generate.prepare import Prepared
from edgespec.cli.options.options import MachineOptions
from edgespec.cli.plan_notes import say_plan
from edgespec.model.target import offload_errors
from edgespec.placement.plan import plan_pair
from edgespec.profiled import verify_curve

MINUTE_S = 60
HOUR_S = 3600


def say_what_would_be_done(console: Console, prepared: Prepared, machine: MachineOptions) -> None:
    """Say plan, room and time on stderr; raises EdgespecError where the pair does not fit the memory."""
    pair, room = prepared.pair, prepared.room
    with offload_errors():
        plan = plan_pair(
            pair.target,
            pair.draft,
            tree=prepared.tree,
            limits=machine.limits,
            device=prepared.device,
            dtype=prepared.dtype,
            quant=machine.quant,
            draft_quant=machine.draft_quant,
            context_tokens=room.context_tokens,
            prompt_tokens=room.prompt_tokens,
        )
    say_plan(
        console,
        pair,
        prepared.tree,
        plan,
        prepared.settled,
        machine,
        device=prepared.device,
        dtype=prepared.dtype,
    )
    if not console.verbose:  # which has it already
        console.say(f"memory plan:\n{plan.placement.table()}")
    console.say(_time_note(prepared))
    console.say("dry run: nothing was loaded or written")


def _time_note(prepared: Prepared) -> str:
    """Say how many seconds the run takes at most, if every answer is as long as it may be."""
    num_turns = sum(request.row.num_turns for request in prepared.requests)
    tokens = sum(request.max_new_tokens * request.row.num_turns for request in prepared.requests)
    limits = [request.max_new_tokens for request in prepared.requests]
    if -1 in limits:
        tokens = prepared.room.new_tokens
    work = f"to do: {len(prepared.requests)} prompts, {num_turns} answers, at most {tokens:,} new tokens"
    settled = prepared.settled
    if settled.profile is None:
        return f"{work}; no time estimate without a profile of this pair (edgespec profile)"
    per_s = settled.predicted_per_s
    if per_s is None:
        return f"{work}; no time estimate: flags override the plan of profile {settled.profile.name}"
    reading = verify_curve(settled.profile)
    prompts_s = sum(float(reading(len(request.ids))) * request.row.num_turns for request in prepared.requests)
    return (
        f"{work}; about {_duration(tokens / per_s + prompts_s)} by profile {settled.profile.name} "
        "if no answer ends early"
    )


def _duration(seconds: float) -> str:
    if seconds < 2 * MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < 2 * HOUR_S:
        return f"{seconds / MINUTE_S:.0f} min"
    return f"{seconds / HOUR_S:.1f} h"
