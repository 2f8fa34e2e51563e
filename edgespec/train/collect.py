"""Collect verification records: the chances that the target accepts the nodes of several policies' trees.

Every prompt is continued by the engine's own loop; after each pass the whole tree is recorded, not
only the path that verification took. A part is written when a prompt is done at a setting: what was
collected before an interruption is not collected again.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.decode.loop import decode
from edgespec.decode.sequence import TextSettings
from edgespec.decode.start import start_sequence
from edgespec.draft.feature_head import open_drafter
from edgespec.draft.language_model import LanguageModelDrafter
from edgespec.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.grow.policies import open_policy
from edgespec.grow.stop_model import distribution_inputs
from edgespec.grow.text_draws import TextDraws
from edgespec.model.target import Target
from edgespec.sampling.noise import DEFAULT_NAME, TextNoise, generator_at, text_key
from edgespec.train.candidates import path_records
from edgespec.train.record_files import RecordsHeader, read_headers, save_records
from edgespec.train.records import Records, expected_tokens, slot_records, stop_records
from edgespec.tree.settings import TreeSettings
from edgespec.tree.token_tree import TokenTree
from edgespec.validation import parse_json
from edgespec.verify import Acceptance, Verification
from edgespec.verify.rows import TargetRows
from edgespec.verify.rules import Verify

Progress = Callable[[int, int], None]  # parts done, parts in all


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectSetting:
    """The tree that a prompt is decoded with, and how its text is drawn."""

    tree: TreeSettings
    sampling: SamplingSettings

    @property
    def label(self) -> str:
        """The setting's name among those of its temperature."""
        parts = (self.tree.policy, self.tree.draw, self.tree.num_nodes, "truncated" * self.sampling.truncates)
        return " ".join(str(part) for part in parts if part)


def acceptance_settings(
    *, size: int, temperatures: Sequence[float], truncated: SamplingSettings
) -> list[CollectSetting]:
    """Return settings for deep trees of coupled children that need no measured acceptance.

    They are drafted at the draft temperature of adaptive trees. A text is drawn from all tokens, and from those that
    `truncated` leaves.
    """
    found = []
    for at in temperatures:
        drafted = TreeSettings().draft_sampling(SamplingSettings(temperature=at)).temperature
        tree = TreeSettings(policy="opt-tree", size=size, max_children=16, draft_temperature=drafted)
        found.append(CollectSetting(tree=tree, sampling=SamplingSettings(temperature=at)))
        if at > 0 and truncated.truncates:
            found.append(CollectSetting(tree=tree, sampling=replace(truncated.unpenalised(), temperature=at)))
    return found


def classifier_settings(*, temperatures: Sequence[float]) -> list[CollectSetting]:
    """Return settings for EAGLE-2's whole trees: 11 layers, 10 wide, 1010 nodes, not reranked (C2T, appendix B.1)."""
    tree = TreeSettings(policy="eagle2", draw="chosen", depth=11, max_children=10, reranked=False)
    return [CollectSetting(tree=tree, sampling=SamplingSettings(temperature=at)) for at in temperatures]


def stop_settings(*, temperatures: Sequence[float]) -> list[CollectSetting]:
    """Return settings for chains and forks, the trees that decision models stop."""
    trees = [TreeSettings(policy="chain", draw="sampled", draft_tokens=8), TreeSettings(policy="mcsd", fork=(4, 8))]
    sampled = [SamplingSettings(temperature=at) for at in temperatures]
    return [CollectSetting(tree=tree, sampling=sampling) for sampling in sampled for tree in trees]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRun:
    """The purpose of records, and the texts that they are of."""

    kind: str  # acceptance, classifier, or the input of a decision model: hidden, probabilities
    max_new_tokens: int
    seed: int


def collect(
    engine: Engine,
    prompts: Sequence[list[int]],
    folder: Path,
    settings: Sequence[CollectSetting],
    *,
    run: RecordRun,
    progress: Progress | None = None,
) -> None:
    """Write records of all prompts to a folder; raises EdgespecError."""
    if engine.draft_model is None:
        raise EdgespecError("E_SETTING", "there is no draft to collect records of.", "Name one with `draft`.")
    names = str(engine.pair.target.folder), str(engine.pair.draft.named if engine.pair.draft else None)
    _check_same_run(folder, [run.kind, run.max_new_tokens, run.seed, list(map(list, prompts))])
    done = {header.setting for header in read_headers(folder)}
    total = len(prompts) * len(settings)
    for index, ids in enumerate(prompts):
        for number, setting in enumerate(settings):
            if (index, setting.label, setting.sampling.temperature) not in done:
                recorder = _Recorder(run.kind, setting, seed=run.seed + index)
                _decode(engine, ids, setting, recorder, max_new_tokens=run.max_new_tokens, seed=run.seed + index)
                header = RecordsHeader(
                    target=names[0],
                    draft=names[1],
                    prompt=index,
                    tree=setting.label,
                    draw=recorder.policy.draw,
                    temperature=setting.sampling.temperature,
                    draft_temperature=recorder.draft_temperature,
                    num_trees=len(recorder.trees),
                    tokens=recorder.num_tokens / max(1, len(recorder.trees)),
                )
                save_records(folder, recorder.records(), header)
            if progress:
                progress(index * len(settings) + number + 1, total)


def _check_same_run(folder: Path, settings: list[Any]) -> None:
    """Raise EdgespecError where a folder was begun with other prompts or settings; note them where it is new."""
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    note = folder / "run.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not note.exists():
            note.write_text(json.dumps({"settings_sha256": digest}), encoding="utf-8")
        is_same = parse_json(note.read_text(encoding="utf-8")).get("settings_sha256") == digest
    except (OSError, ValueError, AttributeError) as error:
        raise EdgespecError("E_RECORDS", f"'{note}' cannot be used ({error}).", "Name another folder.") from error
    if not is_same:
        what = f"'{folder}' holds records of other prompts, another kind, length or seed."
        raise EdgespecError("E_RECORDS", what, "Name another folder, or delete this one.")


class _Recorder:
    """Verifies as usual, and records the tree."""

    def __init__(self, kind: str, setting: CollectSetting, *, seed: int) -> None:
        self.kind, self.setting = kind, setting
        self.sampling = setting.sampling
        self.policy = open_policy(setting.tree)
        self.draft_temperature = setting.tree.draft_sampling(self.sampling).temperature
        self.drafter: LanguageModelDrafter | None = None
        self.trees: list[Records] = []
        self.num_tokens = 0.0  # that verification yields, over all trees: on average, where that is known
        self.verify: Verify | None = None
        self._seed = seed

    def __call__(self, tree: TokenTree, rows: TargetRows, generator: torch.Generator) -> Verification:
        assert self.verify is not None
        acceptance = yield from self.verify(tree, rows, generator)
        if tree.num_nodes > 1:
            p = rows.all_probs()
            self.trees.append(self._record(tree, p, acceptance))
            is_coupled = tree.draw == "coupled"
            self.num_tokens += 1 + len(acceptance.path) if is_coupled else expected_tokens(tree, p)
        return acceptance

    def _record(self, tree: TokenTree, p: Tensor, acceptance: Acceptance) -> Records:
        assert tree.draft_probs is not None
        if self.kind == "acceptance":
            generator = torch.Generator(p.device).manual_seed(self._seed + len(self.trees))
            return path_records(tree, p, acceptance, temperature=self.sampling.temperature, generator=generator)
        if self.kind == "classifier":
            return slot_records(tree, p, temperature=self.sampling.temperature)
        nodes, records = stop_records(tree, p)
        rows = tree.draft_rows[nodes]
        assert self.drafter is not None
        inputs = self.drafter.hidden(rows) if self.kind == "hidden" else distribution_inputs(tree.draft_probs[rows])
        return {**records, "inputs": inputs.float()}

    def records(self) -> Records:
        """Return the records of all trees; raises EdgespecError where there were none."""
        if not self.trees:
            raise EdgespecError("E_RECORDS", "a prompt ended before a tree was grown.", "Use longer continuations.")
        return {name: torch.cat([tree[name] for tree in self.trees]) for name in self.trees[0]}


def _decode(
    engine: Engine, ids: list[int], setting: CollectSetting, recorder: _Recorder, *, max_new_tokens: int, seed: int
) -> None:
    assert engine.draft_model is not None
    target = Target(engine.target_model)
    drafter = open_drafter(engine.draft_model, target, sampling=setting.tree.draft_sampling(recorder.sampling))
    recorder.drafter = drafter
    # Trees reach as deep at the text's end as elsewhere.
    longest = max_new_tokens + setting.tree.num_layers
    settings = TextSettings(sampling=recorder.sampling, max_new_tokens=longest)
    key = text_key(DEFAULT_NAME)
    generator = generator_at(seed, key, len(ids), engine.device)
    noise = TextNoise(seed=seed, key=key, vocab=target.vocab, device=engine.device)
    draws = TextDraws(
        sampling=recorder.sampling, device=engine.device, generator=generator, noise=noise, keeps_draft_probs=True
    )
    session = start_sequence(target, drafter, recorder.policy, settings, draws)
    recorder.verify, session.verify = session.verify, recorder
    steps = decode(session, ids)
    num_tokens = 0
    for step in steps:
        num_tokens += len(step.tokens)
        if num_tokens >= max_new_tokens:
            break
