"""From a pair that is set up to a running engine, with what a person sees of it on the way."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli.console import Console, OnProgress, counted
from edgespec.cli.options.engine import OWN_TEXTS
from edgespec.cli.options.machine import MachineOptions, check_all_resident
from edgespec.cli.spelling import spelled
from edgespec.hub.names import short_name
from edgespec.tree.settings import TreeSettings

if TYPE_CHECKING:
    import torch

    from edgespec.engine import Engine
    from edgespec.pair.folder import ModelFolder
    from edgespec.pair.pair import ModelPair
    from edgespec.placement.pair_setup import PairSetup
    from edgespec.placement.run_config import RunConfig
    from edgespec.placement.weights import Weights
    from edgespec.prefix_cache.prompt_cache import PromptCache

GIB = 1 << 30
FILES_NAMED = 3  # of those that a corpus leaves out


def open_engine(
    console: Console, setup: PairSetup, machine: MachineOptions, *, self_check: bool = True, draft_check: bool = True
) -> Engine:
    """Say where the pair will live, and load it; raises EdgespecError where -ngl all cannot be had."""
    from edgespec.engine import Engine

    say_setup(console, setup, machine)
    with ExitStack() as stack:

        @functools.cache
        def progress() -> Callable[[str, int, int], None]:
            return loading_progress(console, stack.enter_context(console.progress_bar()))

        engine = Engine(
            setup,
            self_check=self_check,
            draft_check=draft_check,
            on_quantize=functools.partial(say_quantizing, console),
            progress=lambda *done: progress()(*done),  # a bar from here on: packing is said before it
        )
    if engine.draft_check is not None and engine.draft_check.is_worth_saying:
        console.say(spelled(f"draft check: {engine.draft_check.in_words}"))
    return engine


def say_setup(console: Console, setup: PairSetup, machine: MachineOptions) -> None:
    """Say layers, formats, trees and profile in a few lines; raises EdgespecError where -ngl all cannot be had."""
    run_config, placement, tree = setup.run_config, setup.placement, setup.tree
    for note in (*setup.pair.notes, *setup.notes):
        console.say(spelled(note))
    layers = where_layers_live(setup)
    numbers = numbers_in_words(setup.weights.target, run_config.device)
    folder = setup.pair.target.folder
    trees = trees_in_words(tree, largest_tree=setup.largest_tree if setup.is_tuned else None)
    console.say(f"{short_name(folder)}: {layers}; {numbers} on {run_config.device}; {trees}")
    for role, weights in (("target", setup.weights.target), ("draft", setup.weights.draft)):
        for note in () if weights is None else weights.unread_notes:
            console.say(f"{role}: {note}")
    console.detail(f"target: {folder}")
    if setup.weights.target.formats is not None:
        console.detail(_multiplied_in_words(setup.weights.target, run_config.device))
    say_notes(console, setup.pair.target, setup.pair.draft)
    _say_threads(console, run_config.threads)
    if not tree.is_lossless:
        console.say(
            f"LOSSY: --target-width {tree.target_width} takes the longest of this many branches that the target "
            "starts; the output does not have the target's distribution"
        )
    if tree.lookup and tree.is_lossless and tree.children != "coupled":
        console.say(
            f"lookup is for temperature 0 here: rules of {tree.children} children need the draft's distribution"
        )
    console.detail(f"memory plan:\n{placement.table()}")
    if setup.plan is not None:
        console.say(_profile_note(setup))
    if run_config.limits.max_gpu_bytes is not None and run_config.device.type == "cpu":
        console.say("--max-gpu-mem is not used: the device is the CPU")
    if run_config.limits.gpu_margin_bytes is not None and run_config.device.type == "cpu":
        console.say("--gpu-margin is not used: the device is the CPU")
    if machine.draft_quant not in {None, "none"} and tree.policy == "none":
        console.say("--draft-quant is not used: there is no draft")
    check_all_resident(machine, setup.weights)


def say_notes(console: Console, *models: ModelFolder | None) -> None:
    """Say the notes of each model, after its name."""
    for model in models:
        if model is not None:
            for note in model.notes:
                console.say(f"{short_name(model.named)} {note}")


def where_layers_live(setup: PairSetup) -> str:
    """Say how many layers stay in memory, how many stream and from where, and how many experts are kept."""
    placement = setup.placement
    streamed = placement.num_layers - placement.num_resident
    where = "" if not placement.num_pinned else f" ({placement.num_pinned} from RAM, {placement.num_on_disk} from disk)"
    found = f"{placement.num_resident} of {placement.num_layers} layers resident"
    if streamed:
        found += f", {streamed} streamed{where}"
    at_most = ""
    if placement.experts is not None:
        experts = placement.experts
        kept = f"{experts.num_kept} of {experts.num_experts} kept"
        waiting = f", {experts.num_pinned} in RAM" if experts.num_pinned else ""
        where = f"computed on the CPU: {kept} in RAM" if experts.is_on_host else f"on demand: {kept}{waiting}"
        found += f", their experts {where}"
        at_most = " at most"
    if placement.waiting_keys:
        found += f", keys and values of {len(placement.waiting_keys)} in RAM"
        at_most = " at most"
    if placement.streamed_bytes:
        found += f", {placement.pass_bytes / GIB:.3f} GiB a pass{at_most}"
    return found


def numbers_in_words(weights: Weights, device: torch.device) -> str:
    """Say what layers are computed in, what they are packed in, and whether a CPU multiplies them so."""
    name = str(weights.dtype).removeprefix("torch.")
    if weights.formats is None:
        return name
    is_multiplied = weights.is_multiplied_packed(device)
    return f"{name} from {weights.formats}" + (", multiplied as packed," if is_multiplied else "")


def _multiplied_in_words(weights: Weights, device: torch.device) -> str:
    """Say how many of the layers' weights are multiplied as they are packed."""
    share = weights.skeleton.multiplied_share(weights.dtype, device)
    return (
        f"target: {share:.0%} of the layers' weights are multiplied as packed; other packed ones are unpacked each pass"
    )


def trees_in_words(tree: TreeSettings, *, largest_tree: TreeSettings | None = None) -> str:
    """Say policy, nodes and depth of the trees, or that there are none; `largest_tree` is that of tuned ones."""
    if tree.policy == "none":
        return "no tree"
    if tree.policy == "lookup":
        size = (tree if largest_tree is None else largest_tree).num_nodes
        return f"trees of up to {counted(size, 'node')} that the text repeats, without a draft"
    own = f"{tree.policy} trees of {counted(tree.num_nodes, 'node')}, depth {tree.num_layers}"
    if largest_tree is None:
        return own
    tuned = f"of up to {counted(largest_tree.num_nodes, 'node')}, as many as pay"
    return f"{tree.policy} trees {tuned}" if tree.children == "coupled" else f"{own}; at temperature 0 {tuned}"


def engine_trees_in_words(engine: Engine) -> str:
    """Say what trees an engine's texts have."""
    return trees_in_words(engine.tree, largest_tree=engine.largest_tree if engine.is_tuned else None)


def corpus_tokens(corpora: Sequence[str]) -> int:
    """Return for how many tokens of --corpus memory is planned."""
    from edgespec.text.corpus import most_corpus_tokens

    paths = [path for path in corpora if path != OWN_TEXTS]
    return most_corpus_tokens(paths, grows=len(paths) < len(corpora))


def use_corpus(console: Console, engine: Engine, corpora: Sequence[str]) -> None:
    """Let the engine look tokens up in the files, folders and texts of --corpus; raises EdgespecError."""
    if not corpora:
        return
    paths = [path for path in corpora if path != OWN_TEXTS]
    corpus = engine.trees.use_corpus(*paths, own_texts=len(paths) < len(corpora))
    if paths:
        left_out = f", {counted(corpus.num_left_out, 'token')} more left out" if corpus.num_left_out else ""
        if corpus.files_left_out:
            left_out += f"; {_files_in_words(corpus.files_left_out)} left out: no text in UTF-8, or more than 4 MiB"
        console.say(f"corpus: {counted(corpus.num_tokens, 'token')}{left_out}")
    if not engine.tree.lookup or engine.tree.policy == "none":
        console.say("--corpus is not used: nothing is looked up")


def _files_in_words(files: Sequence[Path]) -> str:
    """Say how many files these are, and name the first few."""
    names = ", ".join(file.name for file in files[:FILES_NAMED])
    return f"{counted(len(files), 'file')} ({names}{', …' if len(files) > FILES_NAMED else ''})"


def open_prompt_cache(path: Path | None, pair: ModelPair, run_config: RunConfig) -> PromptCache | None:
    """Return the file of --prompt-cache, checked before weights are read; raises EdgespecError."""
    if path is None:
        return None
    from edgespec.prefix_cache.prompt_cache import PromptCache

    return PromptCache(path, pair, run_config)


def use_prompt_cache(
    console: Console, engine: Engine, cache: PromptCache | None, prompts: Iterable[Sequence[int]]
) -> None:
    """Let the engine use the file, which will hold what these prompts have in common at their beginning."""
    if cache is None:
        return
    cache.keep_beginning(prompts)
    found = f"{cache.num_known} of the {cache.num_common} tokens that prompts begin with"
    console.say(f"prompt cache: '{cache.path}' has {found}")
    engine.prefix_cache.prompt_cache = cache


def say_quantizing(console: Console, folder: Path, num_bytes: int, free_bytes: int) -> None:
    """Say how much will be written to the cache, and where: quantised weights, or published ones in another order."""
    console.say(f"packing once: {num_bytes / GIB:.3f} GiB go to {folder} ({free_bytes / GIB:.1f} GiB are free)")


def loading_progress(console: Console, bar: Any) -> Callable[[str, int, int], None]:
    """Return the function that `Engine` reports its loading to; it draws on the bar, if there is one."""
    phases: dict[str, OnProgress] = {}

    def update(phase: str, done: int, total: int) -> None:
        is_layers = phase.startswith("packing")
        if phase not in phases:
            phases[phase] = console.task(bar, phase)
        phases[phase](done, total, f"{done} of {total} layers" if is_layers else f"{done >> 20} of {total >> 20} MiB")

    return update


def _say_threads(console: Console, threads: int | None) -> None:
    """Say how many threads there will be; more than have cores of their own are a remark, and taken as given."""
    from edgespec.machine.cpu import read_cpu, threads_in_words

    cpu = read_cpu()
    if threads is None:
        console.detail(f"threads: {threads_in_words(cpu, os.environ)}")
    elif threads > cpu.usable:
        console.say(f"--threads {threads}: {cpu.usable} have a core of their own here; more may be slower")


def _profile_note(setup: PairSetup) -> str:
    """Say which profile is used, for which temperature, and what it promises."""
    from edgespec.placement.profile_trees import tree_settings
    from edgespec.tuning.memory import plan_for_texts

    assert setup.profile is not None
    assert setup.plan is not None
    predicted, num_texts = setup.predicted_per_s, setup.run_config.num_texts
    of_plan = [tree_settings(plan) for plan in (setup.plan.best, plan_for_texts(setup.plan, num_texts))]
    if predicted is not None:
        promise = f", {predicted:.3g} tokens/s predicted"
    elif setup.differences:  # which were said
        promise = ", no promise here"
    elif setup.tree in of_plan:
        promise = f", no promise for {counted(num_texts, 'text')} under way"
    else:
        promise = ", overridden by flags"
    return f"profile {setup.profile.name}: plan for temperature {setup.plan.temperature:g}{promise}"
