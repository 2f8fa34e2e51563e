"""A profile of a loaded pair: an engine decodes the user's prompts, and what its tuner has learned is kept.

A few sizes of trees come first, so that the seconds of passes are known over their range; then trees tune themselves,
at every temperature. Texts alone and texts that share each pass have a tuner each. Every number of the profile is
what its tuner knows in the end.
"""

import datetime
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from edgespec import __version__
from edgespec.config import SamplingSettings
from edgespec.draft.own_parts import calls_of
from edgespec.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.grow.acceptance import AcceptanceModel
from edgespec.pair.pair import ModelPair
from edgespec.placement.pair_profile import pair_facts
from edgespec.placement.pair_setup import PairSetup, set_up
from edgespec.placement.pair_sizes import PairSizes
from edgespec.placement.run_config import RunConfig
from edgespec.text.handle import TextHandle
from edgespec.train.collect import RecordRun, acceptance_settings, collect
from edgespec.train.fit import fit_acceptance
from edgespec.train.networks import FitSettings
from edgespec.train.record_files import load_records
from edgespec.tuning.costs import SURE
from edgespec.tuning.draft_facts import DraftFacts
from edgespec.tuning.memory import growth_seconds, pass_curves, plan_of
from edgespec.tuning.tree_choice import TreeChoice
from edgespec.tuning.tree_limits import TreeLimits
from edgespec.tuning.tuner import Tuner
from profiles.files import profile_name
from profiles.measure import copy_bytes_per_s, drop_page_cache, machine_facts, read_sequentially
from profiles.schema import SCHEMA, Bandwidths, Plan, Profile, TemperaturePlan

TREE_SIZE, RECORDED_TOKENS = 64, 24  # of what a model is fitted to
FIT_STEPS = 1200
MIN_TREES = 64  # to fit a model to: of fewer, it learns these texts by heart


def fit_pair(
    engine: Engine,
    prompts: Sequence[list[int]],
    temperatures: Sequence[float],
    *,
    seed: int,
    report: Callable[[str, float], None],
    until_s: float,
) -> tuple[AcceptanceModel | None, float | None]:
    """Return a model of the pair's own and its calibration error on held-out prompts; None where trees are too few.

    `until_s` is on the clock of time.perf_counter.
    """
    size = min(TREE_SIZE, engine.largest_tree.num_nodes)
    settings = acceptance_settings(size=size, temperatures=temperatures, truncated=engine.pair.default_sampling())
    parts, num_trees = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for number, ids in enumerate(prompts):
            own = Path(folder) / str(number)
            run = RecordRun(kind="acceptance", max_new_tokens=RECORDED_TOKENS, seed=seed + number)
            collect(engine, [ids], own, settings, run=run)
            records, headers = load_records(own)
            parts.append(records | {"prompt": torch.full_like(records["prompt"], number)})
            num_trees += sum(header.num_trees for header in headers)
            report("learning acceptance", (number + 1) / len(prompts))
            if number and time.perf_counter() > until_s:  # of two prompts, one is held out
                break
    report("learning acceptance", 1.0)
    if num_trees < MIN_TREES:
        return None, None
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    try:
        model, found = fit_acceptance(joined, settings=FitSettings(steps=FIT_STEPS, seed=seed))
    except EdgespecError:  # there are no two prompts
        return None, None
    return model, min(1.0, found.calibration_error)


Report = Callable[[str, float], None]  # stage, the share of it that is done

NUM_TEXTS = (16, 8, 4, 2)  # under way at once, the first that memory allows
TEXT_TOKENS = 160  # of each of them: rows are what is timed, and little of their past
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


def set_up_to_measure(
    pair: ModelPair, run_config: RunConfig, *, num_prompts: int, keeps_draft_probs: bool = False
) -> PairSetup:
    """Set the pair up for several texts under way, as far as they displace no layers; raises EdgespecError.

    `keeps_draft_probs` leaves memory for the records that acceptance is fitted to.
    """
    run_config = replace(run_config, keeps_draft_probs=keeps_draft_probs)
    sizes = PairSizes(pair, run_config)
    alone = set_up(pair, run_config, sizes=sizes)
    # Texts of one prompt ask for the same experts of a mixture, as other texts would not.
    most = num_prompts if sizes.target.skeleton.expert_groups else NUM_TEXTS[0]
    for num_texts in (number for number in NUM_TEXTS if number <= most):
        cache_tokens = max(run_config.context_tokens, num_texts * TEXT_TOKENS)
        try:
            found = set_up(pair, replace(run_config, num_texts=num_texts, cache_tokens=cache_tokens), sizes=sizes)
        except EdgespecError:
            continue
        has_layers = found.placement.resident_share >= MIN_SHARE * alone.placement.resident_share
        # A text alone has the nodes of all.
        has_nodes = num_texts * found.largest_tree.num_nodes >= alone.largest_tree.num_nodes
        if has_layers and has_nodes:
            return found
    return alone


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
    alone = _Texts(run, 1)
    largest = alone.visit_sizes(until_s=time.perf_counter() + SIZES_SHARE * effort.budget_s / 2)
    ends_s = started + effort.allowed_s(alone.choice(run.temperatures[-1]).costs.plain_s(1))
    several = None
    if engine.num_texts > 1:
        several = _Texts(run, engine.num_texts)
        several.visit_sizes(until_s=time.perf_counter() + SIZES_SHARE * (ends_s - started) / 2)
    for number, temperature in enumerate(run.temperatures):
        now = time.perf_counter()
        own_s = (ends_s - now) / (len(run.temperatures) - number)
        alone_s = own_s if several is None else ALONE_SHARE * own_s
        alone.choice(temperature).places[:] = [TreeLimits(largest)] * SURE
        alone.tune(temperature, effort.steps, until_s=now + alone_s)
        if several is not None:
            several.tune(temperature, effort.steps // 2, until_s=now + own_s)
    run.report("tuning trees", 1.0)
    return _profile(run, alone, several, error)


class _Texts:
    """Prompts that are continued in turn, so many at once, and what tunes their trees."""

    def __init__(self, run: ProfileRun, num_texts: int) -> None:
        """A text alone may have the nodes for which the trees of all texts have memory."""
        engine = run.engine
        nodes = engine.run_config.num_texts * engine.largest_tree.size // num_texts
        self.run, self.num_texts = run, num_texts
        calls = calls_of(engine.pair.draft.parts if engine.pair.draft else None)
        largest_tree = replace(engine.largest_tree, size=min(SIZES[-1], nodes))
        self.tuner = Tuner(engine.tree, largest_tree, draft=DraftFacts(calls=calls))

    def choice(self, temperature: float) -> TreeChoice:
        """Return what was learned of such texts."""
        return self.tuner.choice(self.run.sampling(temperature))

    def plan(self, temperature: float) -> Plan:
        """Return what is known of such texts now; trees pay where the seconds of now say so."""
        plan = plan_of(self.choice(temperature), self.num_texts)
        return replace(plan, pays=plan.trees_per_s > plan.plain_per_s)

    def tune(self, temperature: float, steps: int, *, until_s: float) -> None:
        """Let trees tune themselves at a temperature."""
        run = self.run
        number, started = run.temperatures.index(temperature), time.perf_counter()

        def report(num_steps: int) -> None:
            share = max(num_steps / steps, (time.perf_counter() - started) / max(1e-9, until_s - started))
            run.report("tuning trees", (number + min(1.0, share)) / len(run.temperatures))

        with self._decoding(temperature) as step:
            num_steps = 0
            while num_steps < steps and (num_steps < MIN_STEPS or time.perf_counter() < until_s):
                num_steps += step()
                report(num_steps)

    def visit_sizes(self, *, until_s: float) -> int:
        """Time passes without trees, then with trees of ascending sizes while they may pay; return the largest size."""
        run, temperature = self.run, self.run.temperatures[-1]
        choice = self.choice(temperature)
        before, before_s = 1, 0.0
        with self._decoding(temperature) as step:
            for size in (None, *(size for size in SIZES if size <= self.tuner.largest_tree.num_nodes)):
                choice.places[:] = [None if size is None else TreeLimits(size)] * MIN_STEPS
                num_steps = 0
                while num_steps < SURE:
                    num_steps += step()
                choice.places.clear()
                seconds = choice.costs.passes(self.num_texts).seconds(self.num_texts * (1 + (size or 0)))
                run.report("timing sizes of trees", (size or 0) / SIZES[-1])
                if size is not None and size > 1 and seconds > before_s * (size / before) ** GROWTH_POWER:
                    break
                before, before_s = size or 1, seconds
                if time.perf_counter() > until_s:
                    break
        run.report("timing sizes of trees", 1.0)
        return before

    @contextmanager
    def _decoding(self, temperature: float) -> Iterator[Callable[[], bool]]:
        """Yield a function that makes a step of all texts, and returns whether none was only reading its prompt."""
        run, engine, run_config = self.run, self.run.engine, self.run.engine.run_config
        most = min(run_config.context_tokens, run_config.all_tokens // self.num_texts)  # tokens of a text
        new_tokens = min(NEW_TOKENS, most // 2 if self.num_texts > 1 else most - max(map(len, run.prompts)))
        prompts, seeds = itertools.cycle(run.prompts), itertools.count(run.seed)
        texts: list[TextHandle] = []

        def step() -> bool:
            for text in [text for text in texts if text.is_done]:
                text.result()  # raises what ended it
                texts.remove(text)
            while len(texts) < self.num_texts:
                ids = next(prompts)[-(most - new_tokens) :]
                sampling = run.sampling(temperature)
                request = engine.request(ids, max_new_tokens=new_tokens, sampling=sampling, seed=next(seeds))
                texts.append(engine.submit(request, keeps=False))
            is_reading = any(not text.added for text in texts)
            engine.advance()
            return not is_reading

        engine.trees.tune_by(self.tuner)
        try:
            yield step
        finally:
            for text in texts:
                text.cancel()
            while not all(text.is_done for text in texts):
                engine.advance()
            self.tuner = engine.trees.tuner or self.tuner  # another one has smaller trees, since memory ran out


def _profile(run: ProfileRun, alone: _Texts, several: _Texts | None, calibration_error: float | None) -> Profile:
    engine, costs = run.engine, alone.choice(run.temperatures[0]).costs
    passes = pass_curves(costs, {1})
    if several is not None:
        passes += pass_curves(several.choice(run.temperatures[0]).costs, {several.num_texts})
    plans = tuple(
        TemperaturePlan(
            temperature=temperature,
            best=alone.plan(temperature),
            by_texts=() if several is None else (several.plan(temperature),),
        )
        for temperature in run.temperatures
    )
    machine = machine_facts(engine.device)
    pair = pair_facts(
        engine.pair.target, engine.pair.draft, engine.run_config, engine.planned
    )  # by which the next run looks for the profile
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
        passes=passes,
        growth=growth_seconds(costs),
        plans=plans,
        acceptance=None if acceptance is None else acceptance.to_document(),
        calibration_error=calibration_error,
        expert_use=tuple(tuple(round(share, 4) for share in layer) for layer in engine.expert_use or ()),
    )


def _bandwidths(engine: Engine, *, plain_s: float) -> Bandwidths:
    """Return the rates of the ways that weights take here; the disk's is read from the target's own files, uncached."""
    placement = engine.placement
    files = engine.pair.target.checkpoint.files
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
