"""The trees that an engine's texts are decoded with: its own, which may tune themselves, or others that are held to."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from edgespec.config import SamplingSettings
from edgespec.draft.language_model import LanguageModelDrafter
from edgespec.draft.lookup import Corpus
from edgespec.draft.own_parts import calls_of, is_copy, reads_features
from edgespec.errors import EdgespecError
from edgespec.grow.acceptance import AcceptanceModel, copy_acceptance, default_acceptance
from edgespec.grow.batched import grown
from edgespec.grow.policies import OpenPolicy, make_grow, open_policy
from edgespec.grow.text_draws import TextDraws
from edgespec.model.causal_model import CausalModel
from edgespec.pair.tree_support import followed_trees
from edgespec.placement.cache_memory import cache_rows
from edgespec.placement.exact import check_exact
from edgespec.placement.load import LoadedModels
from edgespec.placement.memory import draft_probs_rows
from edgespec.placement.pair_setup import PairSetup
from edgespec.placement.profile_trees import acceptance_of
from edgespec.placement.run_config import RunConfig
from edgespec.sampling.noise import TextNoise
from edgespec.text.admission import TextModels
from edgespec.text.corpus import read_corpus
from edgespec.tree.settings import TreeSettings
from edgespec.tree.token_tree import TokenTree, depths_on_host
from edgespec.tuning.costs import StepCosts
from edgespec.tuning.draft_facts import DraftFacts, FirstGrowth
from edgespec.tuning.draft_worth import DraftWorth
from edgespec.tuning.lookup_choice import LookupSource
from edgespec.tuning.tuner import Tuner, may_follow_clock
from edgespec.verify.near_ties import NearTies

# A small tree is grown when a draft is loaded, so that no text need try what cannot pay
SIZE, DEPTH = 8, 2
FIRST = 4  # positions beside those: of the text's first tokens, the root and its children
READ_TOKENS, QUICK_S = (64, 512), 0.02  # the longer text where a tree behind the shorter one takes no longer
REPEATS = 2
SLOW_S = 0.25  # of a call: it says enough


def first_growth(
    draft: CausalModel, policy: OpenPolicy, sampling: SamplingSettings, *, vocab: int
) -> FirstGrowth | None:
    """Return what a small tree of a language model takes; None for a draft that reads a target's states, or fails."""
    if reads_features(draft.model):
        return None
    tree = policy.settings
    if tree.uses("size"):
        tree = replace(tree, size=min(tree.size, SIZE))
    noise = TextNoise(seed=0, key=0, vocab=vocab, device=draft.device)
    generator = torch.Generator(draft.device).manual_seed(0)
    draws = TextDraws(sampling=sampling, device=draft.device, generator=generator, noise=noise)
    drafter = LanguageModelDrafter(draft, vocab=vocab, sampling=tree.draft_sampling(sampling))
    grow = make_grow(replace(policy, settings=tree), drafter, draws)

    def timed(depth: int) -> tuple[float, TokenTree]:
        drafter.rewind()
        started = time.perf_counter()
        found = grown(grow(0, depth), drafter)
        return time.perf_counter() - started, found

    try:
        drafter.begin([0, 0])
        first_s, found = timed(1)  # the first call loads kernels, too
        if first_s > SLOW_S:
            return FirstGrowth(layers=1, nodes=found.num_nodes - 1, seconds=first_s, row_s=0.0)
        seconds, found = min((timed(DEPTH) for _ in range(REPEATS)), key=lambda one: one[0])
        layer_s, _ = timed(1)
        row_s = 0.0
        for num_read in READ_TOKENS:
            if draft.max_context is not None and num_read + FIRST > draft.max_context:
                break
            drafter.begin([0] * (2 + num_read))
            read_s, _ = timed(1)
            row_s = max(0.0, read_s - layer_s) / num_read
            if read_s > QUICK_S:
                break
    except EdgespecError:  # a text will say it
        return None
    layers = max(1, *depths_on_host(found.parents.tolist()))
    return FirstGrowth(layers=layers, nodes=found.num_nodes - 1, seconds=seconds, row_s=row_s)


def check_tree_fits(tree: TreeSettings, planned: TreeSettings, run_config: RunConfig, *, vocab: int) -> None:
    """Raise EdgespecError for trees that need more memory than those that it was planned for.

    `vocab` is the draft's: sampled trees keep its distributions.
    """
    probs_rows, planned_probs_rows = (draft_probs_rows(vocab, one, run_config) for one in (tree, planned))
    has_rows = all(rows <= there for rows, there in zip(cache_rows(0, tree), cache_rows(0, planned), strict=True))
    if has_rows and probs_rows <= planned_probs_rows:
        return
    drafted_per_node = tree.num_drafted // (tree.num_nodes + 1)
    num_drafted = (
        planned.num_drafted if probs_rows <= planned_probs_rows else min(planned.num_drafted, planned_probs_rows)
    )
    largest = max(0, min(planned.num_nodes, num_drafted // drafted_per_node - 1))
    raise EdgespecError(
        "E_TREE_SIZE",
        f"{tree.policy} trees of {tree.num_nodes} nodes need more memory than is planned, which has room for "
        f"{largest}.",
        f"Use {largest} or less, or start with `policy={tree.policy}`, `size={tree.num_nodes}`.",
    )


FIRST_PACKED = 4  # nodes
MAX_WORTHS = 16  # settings of trees whose worth is remembered


class Trees:
    """The trees of the next text."""

    def __init__(self, setup: PairSetup) -> None:
        self.own, self.profile, self._target = setup.tree, setup.profile, setup.pair.target
        # Measured of this pair, or of another target's copy; it counts where the trees name no other
        self._draft_is_copy = setup.pair.draft is not None and is_copy(setup.pair.draft.parts)
        of_copy = copy_acceptance() if self._draft_is_copy else None
        self.acceptance = of_copy if self.profile is None else acceptance_of(self.profile) or of_copy
        self.pinned: TreeSettings | None = None  # that are held to in place of the engine's own
        self._placed, self._run_config = setup.largest_tree, setup.run_config
        self._sampling = setup.pair.default_sampling()
        model = setup.pair.draft or setup.pair.target
        self._vocab = int(model.config.get_text_config(decoder=True).vocab_size)
        self._draft = DraftFacts(
            calls=calls_of(model.parts), rates=self._usual_rates, target_streams=not setup.placement.is_resident
        )
        self._first_size = _first_size(setup)
        self._own_tuner = self._tuner_within(setup.largest_tree) if setup.is_tuned else None
        self._costs = StepCosts()  # of trees that are held to
        self.worths: dict[TreeSettings, DraftWorth] = {}  # of the draft's trees, beside looked up text
        self._tokenizer = setup.pair.tokenizer
        self.corpus: Corpus | None = None  # that texts are continued by, beside themselves
        self.near_ties = NearTies()
        self.policy = self._open()

    @property
    def settings(self) -> TreeSettings:
        """The trees that grow; where they tune themselves, those of a text that depends on its trees."""
        return self.own if self.pinned is None else self.pinned

    @property
    def tuner(self) -> Tuner | None:
        """What tunes the trees; None where they are held to."""
        return self._own_tuner if self.pinned is None else None

    @property
    def largest_tree(self) -> TreeSettings:
        """The largest trees that may grow."""
        return self.settings if self.tuner is None else self.tuner.largest_tree

    def tuner_for(self, sampling: SamplingSettings) -> Tuner | None:
        """Return what tunes the trees of texts that are sampled so, if anything does."""
        return self.tuner if may_follow_clock(self.settings, sampling) else None

    def use(self, tree: TreeSettings | None) -> None:
        """Hold to these trees, or with None to the engine's own.

        Raises EdgespecError where they are too large, or have branches that the target cannot follow.
        """
        if tree is not None:
            tree = followed_trees(self._target, tree, keeps_row_bits=self._run_config.needs_row_bits)
            check_exact(tree, self._run_config)
            check_tree_fits(tree, self._placed, self._run_config, vocab=self._vocab)
        self.pinned = tree
        self.policy = self._open()

    @contextmanager
    def held_to(self, tree: TreeSettings) -> Iterator[None]:
        """Within this block hold to these trees."""
        pinned = self.pinned
        self.use(tree)
        try:
            yield
        finally:
            self.use(pinned)

    def use_corpus(self, *paths: str | Path, own_texts: bool = False) -> Corpus:
        """Let texts from the next one on be continued by files and folders too, and return their tokens.

        With `own_texts` the engine's texts are added as they end. No text changes by it: where trees take looked up
        tokens, these are proposed. Without arguments there is no corpus any more.
        """
        corpus = read_corpus(paths, self._tokenizer, grows=own_texts)
        self.corpus = corpus if paths or own_texts else None
        return corpus

    def use_smaller(self) -> None:
        """Use smaller trees, or none, because memory ran out."""
        smaller = self.settings.smaller() if self.tuner is None else self.tuner.smaller_tree()
        assert smaller is not None
        if self.tuner is None or smaller.policy == "none":
            self.use(smaller)
        else:
            self.own, self._first_size = self.own.within(smaller), None
            self._own_tuner = self._tuner_within(smaller)
            self.policy = self._open()

    def use_acceptance(self, model: AcceptanceModel) -> None:
        """Grow trees on this acceptance model from the next text on, and tune them anew."""
        self.acceptance = model
        self.policy = self._open()
        self.forget_costs()

    def try_draft(self, loaded: LoadedModels) -> None:
        """Learn what a tree of the draft's takes before the first text, where trees tune themselves."""
        if loaded.draft is None or self._own_tuner is None or self.profile is not None:
            return
        growth = first_growth(loaded.draft, self.policy, self._sampling, vocab=loaded.target.vocab)
        self._draft = replace(self._draft, growth=growth)
        self.forget_costs()

    def _usual_rates(self, temperature: float) -> list[float]:
        """Return the acceptance by rank that trees are grown by, or of the built-in pair."""
        model = self.policy.acceptance or default_acceptance()
        return model.rank_acceptance(temperature, self.policy.draw)

    def tune_by(self, tuner: Tuner) -> None:
        """Let this tuner choose the trees of the next texts."""
        self._own_tuner = tuner

    def forget_costs(self) -> None:
        """Tune the trees anew, from what is known beforehand."""
        if self._own_tuner is not None:
            self._own_tuner = self._tuner_within(self._own_tuner.largest_tree)
        self.worths.clear()

    def text_models(self, loaded: LoadedModels, sampling: SamplingSettings) -> TextModels:
        """Return the models with the trees of a text that is sampled so."""
        return TextModels(
            target=loaded.target,
            draft=loaded.draft if self.settings.needs_draft else None,
            policy=self.policy,
            tuner=self.tuner_for(sampling),
            lookup=LookupSource(
                corpus=self.corpus, costs=self._costs, worth=self._worth(), streams=self._draft.target_streams
            ),
            draft_is_copy=self._draft_is_copy,
            sight=loaded.sight,
            near_ties=self.near_ties if loaded.target.is_exact else None,
        )

    def _worth(self) -> DraftWorth:
        """Return what is known of the draft's trees of these settings; few are kept."""
        if self.settings not in self.worths:
            while len(self.worths) >= MAX_WORTHS:
                del self.worths[next(iter(self.worths))]
            is_first = self.tuner is not None and self.profile is None
            self.worths[self.settings] = (
                self._draft.first_worth(self._sampling.temperature) if is_first else DraftWorth()
            )
        return self.worths[self.settings]

    def _tuner_within(self, largest_tree: TreeSettings) -> Tuner:
        return Tuner(
            self.own, largest_tree,
            first_size=self._first_size, profile=self.profile, num_texts=self._run_config.num_texts, draft=self._draft,
        )  # fmt: skip

    def _open(self) -> OpenPolicy:
        """Return the policy, on the pair's own acceptance where that was measured and no other is named."""
        policy = open_policy(self.settings)
        if self.acceptance is None or self.settings.acceptance is not None:
            return policy
        return policy.with_acceptance(self.acceptance)


def _first_size(setup: PairSetup) -> int | None:
    """Return the nodes of the first tuned trees: the plan's, or few where each row adds to a pass from the first on.

    It does where a CPU multiplies packed weights that are all in memory. None leaves the tuner its own.
    """
    if setup.plan is not None:
        return setup.tree.num_nodes
    is_multiplied = setup.weights.target.is_multiplied_packed(setup.run_config.device)
    return FIRST_PACKED if is_multiplied and setup.placement.is_resident else None
