"""Is a policy lossless? Forms of trees, situations, texts of tables and of tiny drafts, and the law of them.

`scripts.check.lossless` says what the cells are, and runs them all.
"""

import itertools
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import Tensor
from transformers import PreTrainedModel

from edgespec import SamplingSettings, TreeSettings
from edgespec.decode.loop import decode
from edgespec.decode.sequence import Sequence, TextSettings
from edgespec.decode.start import start_sequence
from edgespec.draft.feature_head import open_drafter
from edgespec.draft.lookup import Corpus
from edgespec.draft.own_parts import aux_states_of
from edgespec.grow.classifier import INPUTS as CLASSIFIER_INPUTS
from edgespec.grow.classifier import Classifier
from edgespec.grow.network import Network
from edgespec.grow.policies import OpenPolicy, open_policy
from edgespec.grow.stop_model import StopKind, StopModel, distribution_inputs, input_names
from edgespec.grow.text_draws import TextDraws
from edgespec.model.causal_model import CausalModel
from edgespec.model.target import Target
from edgespec.sampling.distribution import to_probs
from edgespec.sampling.noise import TextNoise
from edgespec.tree.policies import DRAWS
from edgespec.tree.token_tree import TokenTree
from edgespec.tuning.lookup_choice import LookupSource
from edgespec.verify import Verification, rejection, rules
from edgespec.verify.rows import TargetRows
from edgespec.verify.walk import walk
from tests.support.feature_drafts import PUBLISHED, new_drafts, new_target
from tests.support.table_models import TableDrafter, TableTarget

VOCAB = 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
CPU = torch.device("cpu")
PRESET = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
MIN_EXPECTED = 5.0  # texts of an outcome that chi-square is told apart by
PROMPT_IDS = (1, 3, 2, 0)
WARM = SamplingSettings(temperature=1.0)
NUM_TOKENS = 3  # of a text; the first comes from the prompt's pass
ONE_OF_A_DRAW = ("adaptive coupled", "opt-tree chosen", "specinfer sampled")
HEADS = {"whole": (*ONE_OF_A_DRAW, "dyspec"), "routed": (*ONE_OF_A_DRAW, "dyspec"),
         **dict.fromkeys(PUBLISHED, ONE_OF_A_DRAW)}  # fmt: skip
BESIDE_LOOKUP = ("adaptive coupled", "opt-tree coupled", "sequoia coupled", "chain coupled")
# Each token has followed each other one, some more often
CORPUS_IDS = (0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3, 0, 0, 1, 2, 3)
Prefix = tuple[int, ...]
Probs = Mapping[Prefix, Tensor]  # text -> [vocab]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A policy in one of its forms, and what drafts for it."""

    settings: TreeSettings
    head: str = ""  # a draft that reads the target's hidden states: one of HEADS
    looks_up: bool = False  # trees have tokens of the text, and of a corpus that has each pair of them, too

    @property
    def num_tokens(self) -> int:
        """Of a text. Decision models read the nodes above a layer: what they do shows from the third layer on."""
        return NUM_TOKENS + (self.settings.stop_model is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """How the target is sampled from, and how sure both are."""

    sampling: SamplingSettings
    draft_temperature: float | None = None  # where it is another than the target's
    draft_gap: float = 0.0  # nats that one token of every row is above its random logit
    target_gap: float = 0.0


PLAIN = {
    f"temperature {temperature}{', top-p 0.9' if top_p < 1 else ''}": Situation(
        sampling=SamplingSettings(temperature=temperature, top_p=top_p)
    )
    for temperature in (0.7, 1.0)
    for top_p in (1.0, 0.9)
}
SITUATIONS = PLAIN | {
    "top-k 2": Situation(sampling=SamplingSettings(temperature=1.0, top_k=2)),
    "min-p 0.2": Situation(sampling=SamplingSettings(temperature=1.0, min_p=0.2)),
    "draft temperature 0.4": Situation(sampling=WARM, draft_temperature=0.4),
    "draft temperature 0.05": Situation(sampling=WARM, draft_temperature=0.05),
    "draft temperature 0": Situation(sampling=WARM, draft_temperature=0.0),
    "target temperature 0.05": Situation(sampling=SamplingSettings(temperature=0.05), draft_temperature=1.0),
}
GAPS = {f"draft gap {gap}": Situation(sampling=WARM, draft_gap=float(gap)) for gap in (8, 14, 17, 20, 40)} | {
    "both gap 17": Situation(sampling=WARM, draft_gap=17.0, target_gap=17.0)
}
GAPS_OF = {"sampled": tuple(GAPS), "chosen": ("draft gap 20",), "coupled": ("draft gap 20", "both gap 17")}


def forms(folder: Path) -> dict[str, Form]:
    """Every policy in every form, small enough for four tokens: name -> form. Decision models lie in the folder."""
    preset = folder / "preset.json"
    preset.write_text(json.dumps(PRESET), encoding="utf-8")
    by_distribution = save_stop_model(folder / "distribution.safetensors", "probabilities", VOCAB + 1)
    by_state = save_stop_model(folder / "state.safetensors", "hidden", VOCAB)
    classifier = save_classifier(folder / "classifier.json")
    six: dict[str, Any] = {"size": 6, "depth": 3}
    trees = {
        "adaptive coupled": TreeSettings(policy="adaptive", **six),
        "adaptive coupled stop": TreeSettings(policy="adaptive", size=40, depth=3, threshold=0.15, stop_gain=0.6),
        "dyspec": TreeSettings(policy="dyspec", **six),
        "dyspec threshold": TreeSettings(policy="dyspec", size=40, depth=3, threshold=0.15),
    }
    for draw in ("coupled", "chosen"):
        trees |= {
            f"opt-tree {draw}": TreeSettings(policy="opt-tree", draw=draw, **six, stop_gain=0.2),
            f"eagle2 {draw}": TreeSettings(policy="eagle2", draw=draw, **six, max_children=3),
            f"eagle2 ddd {draw}": TreeSettings(
                policy="eagle2", draw=draw, **six, stop_depths=(1, 2), stop_log_probability=-0.5
            ),
            f"c2t {draw}": TreeSettings(policy="c2t", draw=draw, size=12, depth=3, confidence=0.3, max_children=3),
        }
    for draw in DRAWS:
        trees |= {
            f"sequoia {draw}": TreeSettings(policy="sequoia", draw=draw, **six, max_children=3),
            f"specinfer {draw}": TreeSettings(policy="specinfer", draw=draw, branching=(2, 2, 1)),
            f"specinfer stop {draw}": TreeSettings(
                policy="specinfer", draw=draw, branching=(2, 2, 1), stop_model=by_distribution, confidence=0.5
            ),
            f"mcsd {draw}": TreeSettings(policy="mcsd", draw=draw, branching=(3, 1)),
            f"mcsd fork {draw}": TreeSettings(policy="mcsd", draw=draw, fork=(2, 3)),
            f"chain {draw}": TreeSettings(policy="chain", draw=draw, draft_tokens=3),
            f"chain stop {draw}": TreeSettings(
                policy="chain", draw=draw, draft_tokens=3, stop_model=by_state, confidence=0.5
            ),
            f"chain classifier {draw}": TreeSettings(
                policy="chain", draw=draw, draft_tokens=3, classifier=classifier, confidence=0.5
            ),
            f"static {draw}": TreeSettings(policy="static", draw=draw, tree_file=preset),
        }
    found = {name: Form(settings=tree) for name, tree in trees.items()}
    found["lookup alone"] = Form(settings=TreeSettings(policy="lookup", size=6), looks_up=True)
    for name in BESIDE_LOOKUP:
        found[f"{name}, lookup"] = Form(settings=trees[name], looks_up=True)
    for head, names in HEADS.items():
        for name in names:
            found[f"{head} head, {name}"] = Form(settings=trees[name], head=head)
    return found


def save_stop_model(path: Path, kind: StopKind, num_inputs: int) -> Path:
    """A decision model of random weights that at confidence 0.5 stops at half of all random nodes."""
    generator = torch.Generator().manual_seed(num_inputs)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q = (1.2 * normal(1000, VOCAB)).softmax(-1)
    network = Network(
        inputs=input_names(kind, num_inputs),
        mean=torch.zeros(num_inputs).double(),
        std=torch.ones(num_inputs).double(),
        activation="tanh",
        weights=(normal(8, num_inputs), normal(1, 8)),
        biases=(normal(8), torch.zeros(1).double()),
    )
    usual = network(distribution_inputs(q, num_inputs) if kind == "probabilities" else q.log()).logit().median()
    StopModel(kind=kind, network=network.shifted(-float(usual))).save(path)
    return path


def save_classifier(path: Path) -> Path:
    """A classifier that at confidence 0.5 goes on behind paths of probability 0.5 and more."""
    network = Network(
        inputs=CLASSIFIER_INPUTS,
        mean=torch.tensor([0.5, 0.0, 0.0]).double(),
        std=torch.ones(3).double(),
        activation="relu",
        weights=(torch.tensor([[8.0, 0.0, 0.0]]).double(),),
        biases=(torch.zeros(1).double(),),
    )
    Classifier(network=network).save(path)
    return path


def table(
    seed: int, length: int, dtype: torch.dtype, *, sharpness: float = 1.2, gap: float = 0.0
) -> dict[Prefix, Tensor]:
    """Random logits [vocab] after every text of up to `length` tokens, one of each so many nats above its own."""
    generator = torch.Generator().manual_seed(seed)
    prefixes = [path for size in range(length + 1) for path in itertools.product(range(VOCAB), repeat=size)]
    logits = torch.randn(len(prefixes), VOCAB, generator=generator, dtype=torch.float64) * sharpness
    sure = torch.randint(VOCAB, (len(prefixes), 1), generator=generator)
    logits.scatter_add_(1, sure, torch.full_like(logits, gap))
    return dict(zip(prefixes, logits.to(dtype), strict=True))


def distributions(logits: Mapping[Prefix, Tensor], sampling: SamplingSettings) -> dict[Prefix, Tensor]:
    """What is sampled from."""
    return dict(zip(logits, to_probs(torch.stack(list(logits.values())), sampling), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """What texts are decoded with."""

    target: Any
    drafter: Any
    corpus: Corpus | None = None  # None: nothing is looked up

    def sequence(
        self, settings: TextSettings, policy: OpenPolicy, generator: torch.Generator, noise: TextNoise
    ) -> Sequence:
        """A text of its own."""
        draws = TextDraws(sampling=settings.sampling, device=self.target.device, generator=generator, noise=noise)
        lookup = None if self.corpus is None else LookupSource(corpus=self.corpus)
        return start_sequence(self.target, self.drafter, policy, settings, draws, lookup=lookup)


def table_session(
    situation: Situation,
    settings: TreeSettings,
    *,
    dtype: torch.dtype,
    seed: int,
    length: int,
    starts_open: bool = False,
) -> tuple[Models, Probs]:
    """A target and a draft that are tables, and what the target samples from; it starts with token 0, unless open."""
    logits = table(seed, length, dtype, gap=situation.target_gap)
    if not starts_open:
        logits[()] = torch.tensor([1e3, 0.0, 0.0, 0.0], dtype=dtype)
    q = distributions(
        table(seed + 1, length, dtype, gap=situation.draft_gap), settings.draft_sampling(situation.sampling)
    )
    target = TableTarget(lambda text: logits[text[len(PROMPT_IDS) :]], vocab=VOCAB)
    drafter = TableDrafter(lambda text: q[text[len(PROMPT_IDS) :]], lambda rows: rows)
    return Models(target=target, drafter=drafter), distributions(logits, situation.sampling)


def head_session(
    settings: TreeSettings, sampling: SamplingSettings, *, head: str, seed: int, length: int
) -> tuple[Models, Probs]:
    """A random target of one layer with a random head of it, and what the target samples from."""
    torch.manual_seed(seed)
    model = new_target(head, SIZES).eval()
    drafts = new_drafts(model, head, seed=seed).eval()
    own = [weight for weight in drafts.parameters() if weight.requires_grad]
    drafts.requires_grad_(False)
    for weight in (*own, *model.parameters()):
        if weight.ndim > 1:  # spread, so that every mistake shows
            weight.data.normal_(0, 2 * weight.shape[-1] ** -0.5)
    prefixes = [path for size in range(length) for path in itertools.product(range(VOCAB), repeat=size)]
    probs = distributions({prefix: logits_after(model, prefix) for prefix in prefixes}, sampling)
    target = Target(CausalModel(model, device=CPU, keeps_hidden=aux_states_of(drafts) or True))
    drafter = open_drafter(CausalModel(drafts, device=CPU), target, sampling=settings.draft_sampling(sampling))
    return Models(target=target, drafter=drafter), probs


def open_sequence(
    form: Form, situation: Situation, *, dtype: torch.dtype, seed: int, num_tokens: int
) -> tuple[Models, Probs]:
    """A pair for texts of `num_tokens` tokens, and what its target samples from."""
    if form.head:
        return head_session(form.settings, situation.sampling, head=form.head, seed=seed, length=num_tokens)
    # One token more than is looked at: a tree that ended with the text would lack its last layer.
    models, probs = table_session(situation, form.settings, dtype=dtype, seed=seed, length=num_tokens + 1)
    if form.looks_up:
        corpus = Corpus()
        corpus.add(CORPUS_IDS)
        models = replace(models, corpus=corpus)
    return models, probs


def text_probability(probs: Probs, text: Prefix) -> float:
    """What the target gives a text."""
    return math.prod(float(probs[text[:index]][token]) for index, token in enumerate(text))


@torch.no_grad()
def logits_after(model: PreTrainedModel, text: Prefix) -> Tensor:
    """Of a plain forward over the prompt and a text: [vocab]."""
    logits: Tensor = model(input_ids=torch.tensor([[*PROMPT_IDS, *text]]), use_cache=False).logits[0, -1]
    return logits


def texts(
    form: Form,
    sampling: SamplingSettings,
    models: Models,
    *,
    count: int,
    num_tokens: int,
    seed: int,
    plain: bool = False,
) -> Iterator[Prefix]:
    """Texts of `num_tokens` tokens: the first from the prompt's pass, the others through trees, unless `plain`."""
    policy = open_policy(form.settings.plain() if plain else form.settings)
    generator = torch.Generator().manual_seed(seed)
    # One more token than is looked at: a tree that ended with the text would lack its last layer.
    settings = TextSettings(sampling=sampling, max_new_tokens=num_tokens + 1)
    noise_seed = zlib.crc32(f"{seed} {form}".encode())
    for index in range(count):
        noise = TextNoise(seed=noise_seed, key=index, vocab=VOCAB, device=CPU)
        steps = decode(models.sequence(settings, policy, generator, noise), PROMPT_IDS)
        yield tuple(token for step in steps for token in step.tokens)[:num_tokens]


def law_p_value(counts: Mapping[Any, int], probs: Mapping[Any, float]) -> float:
    """The p-value of counts against a law: the smaller of chi-square's and of the rare outcomes' own, twice.

    0 where an outcome of no probability was seen.
    """
    count, total = sum(counts.values()), sum(probs.values())
    expected = {outcome: count * prob / total for outcome, prob in probs.items()}
    if any(counts[outcome] > 0 and expected[outcome] == 0 for outcome in counts):
        return 0.0
    common = [outcome for outcome in expected if expected[outcome] >= MIN_EXPECTED]
    num_rare = count - sum(counts[outcome] for outcome in common)
    rare = sum(expected[outcome] for outcome in expected if expected[outcome] < MIN_EXPECTED)
    observed, means = [counts[outcome] for outcome in common], [expected[outcome] for outcome in common]
    # Too many or too few of the rare ones; the common ones given how many there are.
    tail = min(
        1.0, 2 * min(stats.binom.sf(num_rare - 1, count, rare / count), stats.binom.cdf(num_rare, count, rare / count))
    )
    chi = 1.0
    if len(common) > 1:
        scale = sum(observed) / sum(means)
        chi = stats.chisquare(observed, [scale * mean for mean in means]).pvalue
    return float(min(1.0, 2 * min(tail, chi)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was seen of some texts."""

    p_value: float  # against the target's own distribution
    num_different: int  # coupled texts that plain decoding of the same noise has otherwise


def compare(
    form: Form, situation: Situation, *, count: int, dtype: torch.dtype = torch.float32, seed: int = 5
) -> Found:
    """Decode texts through trees, and coupled ones plainly too."""
    form = replace(form, settings=replace(form.settings, draft_temperature=situation.draft_temperature))
    models, probs = open_sequence(form, situation, dtype=dtype, seed=seed, num_tokens=form.num_tokens)
    counts = dict.fromkeys(itertools.product(range(VOCAB), repeat=form.num_tokens), 0)
    decoded = partial(texts, form, situation.sampling, models, count=count, num_tokens=form.num_tokens, seed=seed)
    plain = decoded(plain=True) if open_policy(form.settings).draw == "coupled" else itertools.repeat(None)
    num_different = 0
    for text, expected in zip(decoded(), plain, strict=False):
        counts[text] += 1
        num_different += expected is not None and text != expected
    p = law_p_value(counts, {text: text_probability(probs, text) for text in counts})
    return Found(p_value=p, num_different=num_different)


def is_greedy(form: Form, *, count: int, num_tokens: int = 4) -> bool:
    """Whether texts at temperature 0 are the target's argmaxes, for `count` pairs."""
    greedy = Situation(sampling=SamplingSettings(temperature=0))
    for seed in range(0, 2 * count, 2):
        models, probs = open_sequence(form, greedy, dtype=torch.float32, seed=seed, num_tokens=num_tokens)
        expected: Prefix = ()
        for _ in range(num_tokens):
            expected = (*expected, int(probs[expected].argmax()))
        (text,) = texts(form, greedy.sampling, models, count=1, num_tokens=num_tokens, seed=seed)
        if text != expected:
            return False
    return True


def total_variation(*, width: int, count: int, seed: int = 5) -> float:
    """Distance between two-token texts of target-initialised trees and the target's own, sampling error included."""
    settings, sampling = TreeSettings(policy="mcsd", branching=(2, 1), target_width=width), WARM
    models, probs = table_session(
        Situation(sampling=sampling), settings, dtype=torch.float32, seed=seed, length=3, starts_open=True
    )
    generator, policy = torch.Generator().manual_seed(seed), open_policy(settings)
    noise = TextNoise(seed=seed, key=0, vocab=VOCAB, device=CPU)  # these children do not share it
    text = TextSettings(sampling=sampling, max_new_tokens=3)
    counts = dict.fromkeys(itertools.product(range(VOCAB), repeat=2), 0)
    for _ in range(count):
        steps = decode(models.sequence(text, policy, generator, noise), PROMPT_IDS)
        first, second, *_ = (token for step in steps for token in step.tokens)
        counts[first, second] += 1
    return sum(abs(counts[text] / count - text_probability(probs, text)) for text in counts) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOf:
    """One line of the table."""

    name: str
    form: Form
    label: str
    situation: Situation | None  # None: temperature 0
    dtype: torch.dtype = torch.float32

    def row(self, num_texts: int, bound: float) -> dict[str, Any]:
        """What came out."""
        torch.set_num_threads(1)
        row: dict[str, Any] = {"policy": self.name, "sampling": self.label, "dtype": str(self.dtype).split(".")[1]}
        if self.situation is None:
            return {**row, "passed": is_greedy(self.form, count=10 if self.form.head else 100)}
        found = compare(self.form, self.situation, count=num_texts, dtype=self.dtype)
        passed = found.p_value > bound and found.num_different == 0
        return {**row, "p_value": found.p_value, "different": found.num_different, "passed": passed}


def cells(folder: Path, only: str) -> list[CellOf]:
    """Every form in every situation in float32; tables in the plain ones in float64 too, and with sure drafts.

    Where text is looked up, they are in bfloat16 as well.

    Chosen and coupled children meet one sure draft, for their rules do not read q; coupled ones a sure target too.
    """
    found = []
    for name, form in forms(folder).items():
        found.append(CellOf(name=name, form=form, label="temperature 0", situation=None))
        gaps = () if form.head else GAPS_OF[open_policy(form.settings).draw]
        labels = ("temperature 1.0",) if form.head in PUBLISHED else (*SITUATIONS, *gaps)
        for label in labels:
            situation = (SITUATIONS | GAPS)[label]
            cell = CellOf(name=name, form=form, label=label, situation=situation)
            found.append(cell)
            if not form.head and label in PLAIN:
                found.append(replace(cell, dtype=torch.float64))
            if form.looks_up and label in PLAIN:
                found.append(replace(cell, dtype=torch.bfloat16))
    return [cell for cell in found if only in f"{cell.name}, {cell.label}"]


def try_children_by_difference(
    p: Tensor, q: Tensor | None, tokens: list[int], uniforms: list[float]
) -> tuple[int | None, Tensor]:
    """A wrong version of `rejection._try_children`: the mass left is one minus what was drawn, in the format of p.

    Exact in real numbers; in float32 it is rounding error where q is nearly one-hot.
    """
    scale, total, mass_left = 0.0, 1.0, 1.0
    residual = p
    for index, (token, uniform) in enumerate(zip(tokens, uniforms, strict=True)):
        q_here = float(q[token])
        mass_left = max(mass_left, q_here)
        if uniform * q_here * total < float(residual[token]) * mass_left:
            return index, residual
        next_scale = scale + total / mass_left
        next_residual = (p - next_scale * q).clamp(min=0)
        if next_residual.sum() <= 0:
            return index, residual
        scale, total, residual = next_scale, float(next_residual.sum()), next_residual
        mass_left -= q_here
    return None, residual


def verify_by_noise_of_another_position(tree: TokenTree, rows: TargetRows, noise: TextNoise) -> Verification:
    """A wrong version of `walk.verify_coupled`: below the root it takes the noise of one position further on.

    Each token is drawn from p all the same; only plain decoding, whose trees are roots, has others.
    """
    return walk(tree, lambda node, depth: noise.draw(rows.probs(node), depth + 1 + (depth > 0)))


def plant(fault: str | None) -> None:
    """Put a wrong version in the place of a right one, in this process."""
    if fault == "difference":
        rejection._try_children = try_children_by_difference
    elif fault == "noise":
        rules.verify_coupled = verify_by_noise_of_another_position
