"""A profile of a loaded pair: an engine decodes the user's prompts, and what its tuner has learned is kept.

A few sizes of trees come first, so that the seconds of passes are known over their range; then trees tune themselves,
at every temperature: those of one text, and those of several that share each pass.
"""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edgespec import __version__
from edgespec.config import SamplingSettings
from edgespec.doctor.pair_acceptance import fit_pair
from edgespec.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.pair.pair import ModelPair
from edgespec.placement.pair_profile import pair_facts
from edgespec.placement.pair_setup import PairSetup, set_up
from edgespec.placement.run_config import RunConfig
from edgespec.text.handle import TextHandle
from edgespec.tuning.costs import SURE
from edgespec.tuning.memory import growth_seconds, pass_curves, plan_of
from edgespec.tuning.tree_choice import TreeChoice
from edgespec.tuning.tree_limits import TreeLimits
from profiles.files import profile_name
from profiles.measure import copy_bytes_per_s, drop_page_cache, machine_facts, read_sequentially
from profiles.schema import SCHEMA, Bandwidths, Plan, Profile, TemperaturePlan

Report = Callable[[str, float], None]  # stage, the share of it that is done

NUM_TEXTS = (4, 2, 1)  # under way at once, the first that memory allows
MIN_SHARE = 0.9  # of the layers that one text leaves resident: more must not be given up for measuring several
NEW_TOKENS = 128  # of a text
MIN_STEPS = 2 * SURE  # where time has run out: so few say little, and none would say nothing
SIZES = (1, 4, 16, 64, 256)  # of trees whose passes are timed first
GROWTH_POWER = 0.68  # twice the nodes bring at most 1.6 times the tokens: a pass that costs more does not pay
SIZES_SHARE, ALONE_SHARE = 0.2, 0.7  # of the time: for sizes; of what is left, for texts alone
DISK_READ_BYTES = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long all measuring may take."""

    budget_s: float
    max_s: float  # where passes are slow
    passes: int = 1200  # for which there is time then
    steps: int  # of each temperature, after which no more is learned
    fits_acceptance: bool = False  # a model of the pair's own

    def allowed_s(self, pass_s: float) -> float:
        """Return all time there is, for a target whose plain pass takes so long."""
        return max(self.budget_s, min(self.passes * pass_s, self.max_s))


QUICK = Effort(budget_s=60, max_s=240, steps=600)
FULL = Effort(budget_s=300, max_s=1200, steps=3000, fits_acceptance=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRun:
    """A loaded pair whose trees tune themselves, the texts to decode, and how long that may take."""

    engine: Engine
    prompts: Sequence[list[int]]
    temperatures: Sequence[float]
    effort: Effort
    seed: int = 0
    report: Report = lambda _stage, _share: None

    def sampling(self, temperature: float) -> SamplingSettings:
        """Return the target's own sampling at this temperature, without its penalties."""
        return replace(self.engine.pair.default_sampling().unpenalised(), temperature=temperature)

    def choice(self, temperature: float) -> TreeChoice:
        """Return what the engine has learned of such texts."""
        tuner = self.engine.trees.tuner
        assert tuner is not None
        return tuner.choice(self.sampling(temperature))


def set_up_to_measure(pair: ModelPair, run_config: RunConfig, *, keeps_draft_probs: bool = False) -> PairSetup:
    """Set the pair up for several texts under way, as far as they displace no layers; raises EdgespecError.

    `keeps_draft_probs` leaves memory for the records that acceptance is fitted to.
    """
    run_config = replace(run_config, keeps_draft_probs=keeps_draft_probs)
    alone = set_up(pair, run_config)
    least_share = MIN_SHARE * alone.placement.resident_share
    for num_texts in NUM_TEXTS[:-1]:
        # The texts have the room of one long text: rows are what is timed, and little of their past.
        shared = replace(run_config, num_texts=num_texts, cache_tokens=run_config.context_tokens)
        try:
            found = set_up(pair, shared)
        except EdgespecError:
            continue
        if found.placement.resident_share >= least_share and found.largest_tree == alone.largest_tree:
            return found
    return alone


def profile_pair(run: ProfileRun) -> Profile:
    """Measure the pair; raises EdgespecError without a draft."""
    engine, effort = run.engine, run.effort
    if engine.draft_model is None:
        raise EdgespecError("E_SETTING", "there is no draft to profile the target with.", "Name one with `draft`.")
    started = time.perf_counter()
    error = None
    if effort.fits_acceptance:
        model, error = fit_pair(engine, run.prompts, run.temperatures, seed=run.seed, report=run.report,
                                until_s=started + effort.budget_s / 3)  # fmt: skip
        if model is not None:
            engine.trees.use_acceptance(model)
    largest = _visit_sizes(run, 1, until_s=time.perf_counter() + SIZES_SHARE * effort.budget_s / 2)
    ends_s = started + effort.allowed_s(run.choice(run.temperatures[-1]).costs.plain_s(1))
    if engine.num_texts > 1:
        _visit_sizes(run, engine.num_texts, until_s=time.perf_counter() + SIZES_SHARE * (ends_s - started) / 2)
    plans = tuple(_plan(run, number, largest, ends_s=ends_s) for number in range(len(run.temperatures)))
    run.report("tuning trees", 1.0)
    return _profile(run, plans, error)


def _plan(run: ProfileRun, number: int, largest: int, *, ends_s: float) -> TemperaturePlan:
    """Let trees tune themselves at a temperature, after some of the `largest` size; return where they ended."""
    temperature, now = run.temperatures[number], time.perf_counter()
    run.choice(temperature).places[:] = [TreeLimits(largest)] * SURE
    own_s = (ends_s - now) / (len(run.temperatures) - number)
    several = run.engine.num_texts
    alone_s = own_s if several == 1 else ALONE_SHARE * own_s

    def report(share: float) -> None:
        run.report("tuning trees", (number + share) / len(run.temperatures))

    _decode(run, temperature, 1, until_s=now + alone_s, steps=run.effort.steps, report=report)
    best = plan_of(run.choice(temperature), 1)
    by_texts: tuple[Plan, ...] = ()
    if several > 1:
        _decode(run, temperature, several, until_s=now + own_s, steps=run.effort.steps // 2, report=report)
        by_texts = (plan_of(run.choice(temperature), several),)
    return TemperaturePlan(temperature=temperature, best=best, by_texts=by_texts)


def _visit_sizes(run: ProfileRun, num_texts: int, *, until_s: float) -> int:
    """Time passes without trees, then with trees of ascending sizes while they may pay; return the largest size."""
    temperature = run.temperatures[-1]
    passes = run.choice(temperature).costs.passes(num_texts)
    before, before_s = 1, 0.0
    for size in (None, *(size for size in SIZES if size <= run.engine.largest_tree.num_nodes)):
        run.choice(temperature).places[:] = [None if size is None else TreeLimits(size)] * SURE
        _decode(run, temperature, num_texts, until_s=until_s, steps=SURE, report=lambda _share: None)
        run.choice(temperature).places.clear()
        seconds = passes.seconds(num_texts * (1 + (size or 0)))
        run.report("timing sizes of trees", (size or 0) / SIZES[-1])
        if size is not None and size > 1 and seconds > before_s * (size / before) ** GROWTH_POWER:
            break
        before, before_s = size or 1, seconds
        if time.perf_counter() > until_s:
            break
    run.report("timing sizes of trees", 1.0)
    return before


def _decode(
    run: ProfileRun, temperature: float, num_texts: int, *, until_s: float, steps: int, report: Callable[[float], None]
) -> None:
    """Continue prompts in turn, so many at once, for so many steps or until then, but for some steps at least."""
    engine, started = run.engine, time.perf_counter()
    room = engine.run_config.all_tokens // num_texts
    new_tokens = min(NEW_TOKENS, room // 2 if num_texts > 1 else room - max(map(len, run.prompts)))
    prompts = itertools.cycle(run.prompts)
    texts: list[TextHandle] = []
    seeds = itertools.count(run.seed)
    num_steps = 0
    try:
        while num_steps < steps and (num_steps < MIN_STEPS or time.perf_counter() < until_s):
            for text in [text for text in texts if text.is_done]:
                text.result()  # raises what ended it
                texts.remove(text)
            while len(texts) < num_texts:
                ids = next(prompts)[-(room - new_tokens) :]
                sampling = run.sampling(temperature)
                request = engine.request(ids, max_new_tokens=new_tokens, sampling=sampling, seed=next(seeds))
                texts.append(engine.submit(request, keeps=False))
            is_reading = any(not text.added for text in texts)
            engine.advance()
            num_steps += not is_reading
            now = time.perf_counter()
            report(min(1.0, max(num_steps / steps, (now - started) / max(1e-9, until_s - started))))
    finally:
        for text in texts:
            text.cancel()
        while not all(text.is_done for text in texts):
            engine.advance()


def _profile(run: ProfileRun, plans: tuple[TemperaturePlan, ...], calibration_error: float | None) -> Profile:
    engine, costs = run.engine, run.choice(run.temperatures[0]).costs
    machine = machine_facts(engine.device)
    pair = pair_facts(engine.pair, engine.run_config, engine.planned)  # by which the next run looks for the profile
    acceptance = engine.trees.acceptance
    return Profile(
        schema=SCHEMA,
        created=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        edgespec=__version__,
        name=profile_name(machine, pair),
        context_tokens=max(map(len, run.prompts)),
        num_prompts=len(run.prompts),
        machine=machine,
        pair=pair,
        bandwidths=_bandwidths(engine, plain_s=costs.plain_s(1)),
        passes=pass_curves(costs, {1, engine.num_texts}),
        growth=growth_seconds(costs),
        plans=plans,
        acceptance=None if acceptance is None else acceptance.to_document(),
        calibration_error=calibration_error,
        expert_use=tuple(tuple(round(share, 4) for share in layer) for layer in engine.expert_use or ()),
    )


def _bandwidths(engine: Engine, *, plain_s: float) -> Bandwidths:
    """Return the rates of the ways that weights take here; the disk's is read from the target's own files, uncached."""
    placement = engine.placement
    files = sorted({entry.file for entry in engine.pair.target.checkpoint.tensors.values()})
    disk_per_s = None
    if placement.num_on_disk and drop_page_cache(files):
        disk_per_s = read_sequentially(files, most_bytes=DISK_READ_BYTES).bytes_per_s
    has_copies = engine.device.type == "cuda" and not placement.is_resident
    return Bandwidths(
        disk_sequential_per_s=disk_per_s,
        disk_streamed_per_s=placement.disk_bytes / plain_s if placement.num_on_disk else None,
        copy_pinned_per_s=copy_bytes_per_s(engine.device, pinned=True) if has_copies else None,
        copy_pageable_per_s=copy_bytes_per_s(engine.device, pinned=False) if has_copies else None,
    )
