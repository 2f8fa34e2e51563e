"""Acceptance by rank for estimates and plans: a rate's, measured, as published, or the built-in pair's.

One rate becomes a vector by a power law, Sequoia's model of acceptance (Chen et al. 2024, section 4.2): the
chance that none of the first k children is accepted is (k + 1)^-b, with b such that the first child is
accepted at the given rate. The child of rank k then adds (k + 1)^-b - (k + 2)^-b. From the built-in pair's
first rate this makes 3 to 16 % more tokens a pass, at 16 to 768 nodes, than its measured vectors do. Published
tokens a pass of Sequoia's trees are turned into a rate by the same law, the other way round.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgespec.config import require
from edgespec.draft.mtp import MtpFuse
from edgespec.draft.own_parts import aux_states_of, is_copy, reads_features
from edgespec.grow.acceptance import AcceptanceModel, default_acceptance
from edgespec.grow.sequoia import power_law
from edgespec.placement.place import PairWeights
from edgespec.tree.settings import TreeSettings
from edgespec.tuning.draft_memory import LearnedRate, learned_rate
from profiles.hardware import read_assumptions


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedAcceptance:
    """For each rank, the chance that its child is the one accepted; and where the chances are from."""

    rates: tuple[float, ...]
    about: str  # for people
    hint: str = ""  # what to try where it was neither measured on this pair nor given


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Tokens a pass of a pair of real models through Sequoia's trees, and the rate that yields as many."""

    model_type: str  # of both models, as config.json has it
    pair: str
    size_ratio: float  # parameters of the target over those of the draft
    source: str
    temperature: float
    rate: float
    tokens: Mapping[int, float]  # nodes below the root -> tokens a pass


_DYSPEC = "DySpec, tables 3 and 4, column Sequoia"
_LLAMA_2 = "Llama-2 7B drafting for 70B"
PUBLISHED = (
    # 64 nodes: the mean of C4, OpenWebText, CNN, GSM8k and MT-Bench; 768 nodes: of the first three
    Published(
        model_type="llama", pair=_LLAMA_2, size_ratio=10, source=_DYSPEC, temperature=0.0, rate=0.79,
        tokens={64: 6.80, 768: 9.58},
    ),
    Published(
        model_type="llama", pair=_LLAMA_2, size_ratio=10, source=_DYSPEC, temperature=0.6, rate=0.775,
        tokens={64: 6.44, 768: 8.96},
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedChain:
    """Tokens a pass of chains that published drafts of a form grow, and the rate of each token that yields as many."""

    drafts: str
    source: str
    rate: float
    length: int
    tokens: float


CHAINS = {
    "eagle3": PublishedChain(
        drafts="an EAGLE-3 head of Llama-3.3-70B on MT-bench", source="SpecBundle, data.json", rate=0.785, length=7,
        tokens=3.98,
    ),
    "mtp": PublishedChain(
        drafts="Qwen3.x and its own layer", source="vLLM, recipes #839: 2.8 to 3.0 tokens a pass of chains of 3",
        rate=0.788, length=3, tokens=2.9,
    ),
}  # fmt: skip
HINT = "a guess for yours, which edgespec profile measures; `acceptance=0.7` tries another rate"
MUCH_SMALLER = 2.0  # times smaller than the published draft: from here on a note says to expect less


def acceptance_rate(setting: Path | None) -> float | None:
    """Return the number that `acceptance` was given, if it was one; ./0.8 is a file of that name."""
    try:
        return None if setting is None else float(str(setting))
    except ValueError:
        return None


def acceptance_of_draft(
    weights: PairWeights, tree: TreeSettings, temperature: float | None, *, is_built_in: bool = False,
    expects_less: bool = False, measured: LearnedRate | None = None,
) -> AssumedAcceptance:  # fmt: skip
    """Return acceptance by rank of a pair's draft, as the settings say, or else as it was `measured` or learned here.

    Else as drafts of its kind have it; the `is_built_in` pair has its own. Where one `expects_less`, the tiny built-in
    pair's counts for a model that is far smaller than published ones. Raises EdgespecError for a bad rate or file.
    """
    target, draft = weights.target, weights.draft
    learned = None if draft is None or tree.acceptance else measured or learned_rate(target.model, draft.model)
    if learned is not None:
        about = f"{learned.rate:.3g} for a first child, as {learned.num_trees:.0f} of its trees have shown here"
        return AssumedAcceptance(rates=power_law(learned.rate), about=about)
    if draft is None or is_built_in:
        return assumed_acceptance(tree, temperature)
    if draft.model.is_language_model:
        types = {target.model.config.model_type, draft.model.config.model_type}
        ratio = target.num_parameters / max(1, draft.num_parameters)
        if expects_less and ratio > MUCH_SMALLER * max(one.size_ratio for one in PUBLISHED):
            return assumed_acceptance(tree, temperature)
        return assumed_acceptance(tree, temperature, model_types=types, size_ratio=ratio)
    model = draft.skeleton.model
    is_eagle3 = aux_states_of(model) is not None and not hasattr(model, "block")
    is_mtp = reads_features(model) and isinstance(model.fuse, MtpFuse)  # or an assistant
    kind = "copy" if is_copy(draft.model.parts) else "mtp" if is_mtp else "eagle3" if is_eagle3 else None
    return assumed_acceptance(tree, temperature, draft_kind=kind)


def assumed_acceptance(
    tree: TreeSettings, temperature: float | None, *, model_types: Collection[str] = (), size_ratio: float = 1.0,
    draft_kind: str | None = None,
) -> AssumedAcceptance:  # fmt: skip
    """Return acceptance by rank, as the settings say; raises EdgespecError for a bad rate or file.

    Where they say nothing it is that of published drafts of this `draft_kind`, or of pairs of the models' types, or the
    built-in pair's. `size_ratio` is the target's parameters over the draft's.
    """
    rate = acceptance_rate(tree.acceptance)
    if rate is not None:
        require(
            temperature is None,
            f"`temperature={temperature}` means nothing to the rate `acceptance={tree.acceptance}`.",
            "Leave it out, or give a file of measurements.",
        )
        return AssumedAcceptance(rates=power_law(rate), about=f"{rate:g} for a first child, a power law for the others")
    if draft_kind == "copy" and tree.acceptance is None:
        assumed = read_assumptions()
        about = f"{assumed.copy_acceptance:g} for a first child of a 4-bit copy: {assumed.reasons['copy_acceptance']}"
        return AssumedAcceptance(rates=power_law(assumed.copy_acceptance), about=about, hint=HINT)
    if draft_kind in CHAINS and tree.acceptance is None:
        of = CHAINS[draft_kind]
        about = f"{of.rate:g} for a first child, as published for {of.drafts} ({of.source})"
        return AssumedAcceptance(rates=power_law(of.rate), about=about, hint=HINT)
    found = [one for one in PUBLISHED if set(model_types) == {one.model_type}] if tree.acceptance is None else []
    if found:
        best = min(found, key=lambda one: abs(one.temperature - (temperature or 0.0)))
        return AssumedAcceptance(rates=power_law(best.rate), about=_as_published(best, size_ratio), hint=HINT)
    model = AcceptanceModel.load(tree.acceptance) if tree.acceptance else default_acceptance()
    at = temperature or 0.0
    draw = tree.children
    owner = f"of '{tree.acceptance}'" if tree.acceptance else "of the built-in pair"
    return AssumedAcceptance(
        rates=tuple(model.rank_acceptance(at, draw)),
        about=f"{owner} at temperature {at:g}, {draw} children",
        hint=""
        if tree.acceptance
        else f"a tiny pair's: `acceptance={PUBLISHED[0].rate:g}` is {PUBLISHED[0].pair}; {HINT}",
    )


def _as_published(found: Published, size_ratio: float) -> str:
    about = (
        f"{found.rate:g} for a first child, as published for {found.pair} at temperature {found.temperature:g} "
        f"({found.source})"
    )
    if size_ratio > MUCH_SMALLER * found.size_ratio:
        about += (
            f"; this draft is {size_ratio:.0f} times smaller than its target, theirs {found.size_ratio:g} times: "
            "expect less"
        )
    return about
