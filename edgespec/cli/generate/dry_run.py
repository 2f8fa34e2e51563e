"""`generate --dry-run`: the memory plan, and how long it may take by the pair's profile."""

from collections.abc import Sequence

from edgespec.cli.console import Console, counted
from edgespec.cli.generate.prepare import GenerateRun
from edgespec.cli.generate.progress import duration
from edgespec.cli.generate.requests import Request
from edgespec.cli.open_engine import say_setup
from edgespec.cli.options.machine import MachineOptions
from edgespec.tuning.memory import known_costs


def say_work(console: Console, run: GenerateRun, machine: MachineOptions) -> None:
    """The placement, the work and its time, on stderr; raises EdgespecError where -ngl all cannot be had."""
    say_setup(console, run.setup, machine)
    if not console.verbose:  # which has it already
        console.say(f"memory plan:\n{run.setup.placement.table()}")
    console.say(_time_note(run))
    console.say("dry run: nothing was loaded or written")


def _time_note(run: GenerateRun) -> str:
    """Say how many seconds the run takes at most, if every answer is as long as it may be."""
    tokens, work = work_note(run.requests)
    setup = run.setup
    if setup.profile is None:
        return f"{work}; no time estimate without a profile of this pair (edgespec profile)"
    per_s = setup.predicted_per_s
    if per_s is None:
        if setup.differences:
            return f"{work}; no time estimate: profile {setup.profile.name} was measured elsewhere"
        return f"{work}; no time estimate: flags override the plan of profile {setup.profile.name}"
    passes = known_costs(setup.profile).passes(1)
    fitting = [request for request in run.requests if request.fault is None]
    prompts_s = sum(passes.seconds(len(request.ids)) * request.row.num_turns for request in fitting)
    return (
        f"{work}; about {duration(tokens / per_s + prompts_s)} by profile {setup.profile.name} if no answer ends early"
    )


def work_note(requests: Sequence[Request]) -> tuple[int, str]:
    """Return the most tokens that the requests that fit may make, and say it with their number."""
    fitting = [request for request in requests if request.fault is None]
    tokens = sum(request.most_tokens for request in fitting)
    answers = counted(sum(request.row.num_turns for request in fitting), "answer")
    return tokens, f"to do: {counted(len(fitting), 'prompt')}, {answers}, at most {counted(tokens, 'new token')}"
