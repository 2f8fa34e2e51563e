"""The small models of growth: what they may read, their files, and what is refused."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from edgespec.errors import EdgespecError
from edgespec.grow.acceptance import (
    COLUMNS,
    INPUTS,
    AcceptanceModel,
    Candidates,
    Measured,
    candidates_of,
    default_acceptance,
    network_features,
    read_inputs,
)
from edgespec.grow.children import best_children
from edgespec.grow.classifier import INPUTS as CLASSIFIER_INPUTS
from edgespec.grow.classifier import Classifier
from edgespec.grow.growing import Layer
from edgespec.grow.network import Network
from edgespec.grow.stop_model import StopModel, distribution_inputs, input_names, model_exit
from edgespec.sampling.noise import exponential_noise

VOCAB = 40
MEASURED = (
    Measured(draw="coupled", temperature=0.0, rates=(0.5, 0.25)),
    Measured(draw="coupled", temperature=1.0, rates=(0.75,)),
    Measured(draw="sampled", temperature=0.0, rates=(0.7, 0.1)),
)


def random_network(names: tuple[str, ...], seed: int, *, hidden: tuple[int, ...] = (5,)) -> Network:
    generator = torch.Generator().manual_seed(seed)
    sizes = (len(names), *hidden, 1)
    return Network(
        inputs=names,
        mean=torch.randn(len(names), generator=generator, dtype=torch.float64),
        std=torch.rand(len(names), generator=generator, dtype=torch.float64) + 0.5,
        activation="tanh",
        weights=tuple(
            torch.randn(sizes[i + 1], sizes[i], generator=generator, dtype=torch.float64)
            for i in range(len(hidden) + 1)
        ),
        biases=tuple(torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes[1:]),
    )


def model(**changes: Any) -> AcceptanceModel:
    parts: dict[str, Any] = {
        "candidate": random_network(INPUTS["candidate"], 0),
        "none": random_network(INPUTS["none"], 1),
        "measured": MEASURED,
        "about": {"target": "big", "draft": "small"},
    }
    return AcceptanceModel(**{**parts, **changes})


def some_candidates(*, count: int = 6, with_noise: bool = True, depth: int = 2) -> Candidates:
    """Of three nodes, the last of which has two tokens alone."""
    logits = 2 * torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    logits[2, 2:] = -torch.inf
    q = logits.softmax(-1)
    noise = 1 / exponential_noise(1, 2, 3, VOCAB) if with_noise else None
    tokens, perturbed = best_children(q, count, noise)
    return candidates_of(
        q, tokens, perturbed, None if noise is None else noise[tokens], depth=torch.full((1, 1), depth), temperature=0.6
    )


def test_a_network_is_its_formula() -> None:
    network = random_network(("a", "b", "c"), 3)
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    hidden = torch.tanh((x - network.mean) / network.std @ network.weights[0].T + network.biases[0])
    expected = torch.sigmoid(hidden @ network.weights[1].T + network.biases[1])[..., 0]
    torch.testing.assert_close(network(x), expected)
    assert network(x.float()).dtype == torch.float32
    torch.testing.assert_close(network(x.float()).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_noise", [True, False])
def test_what_is_known_of_candidates_is_what_their_names_say(with_noise: bool) -> None:
    found = some_candidates(with_noise=with_noise)
    assert found.keys() == set(COLUMNS)
    logits = 2 * torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    q = logits[0].softmax(-1)
    gumbel = -exponential_noise(1, 2, 3, VOCAB).log() * with_noise
    perturbed = (q.log() + gumbel).softmax(-1)
    for rank, token in enumerate(perturbed.argsort(descending=True)[:6].tolist()):
        expected = {"q": q[token], "perturbed": perturbed[token], "gumbel": gumbel[token], "rank": rank}
        for name, value in expected.items():
            column = found[name].expand(3, -1)
            assert float(column[0, rank]) == pytest.approx(float(value), abs=1e-12), name
    of_the_node = {"concentration": q.square().sum(), "top_q": q.max(), "depth": 2, "temperature": 0.6}
    for name, value in of_the_node.items():
        assert float(found[name].expand(3, -1)[0, 0]) == pytest.approx(float(value)), name


@pytest.mark.parametrize("with_noise", [True, False])
def test_predictions_are_a_distribution_over_the_candidates_and_none_of_them(with_noise: bool) -> None:
    """So siblings compete: what one of them gains, the others and none of them lose."""
    candidates, found = some_candidates(with_noise=with_noise), model()
    chances = found.candidate_acceptance(candidates)
    assert (chances.shape, chances.dtype) == ((3, 6), torch.float64)
    of_each = network_features(found.candidate.inputs, read_inputs(candidates))
    of_none = network_features(found.none.inputs, read_inputs(candidates))
    for node in range(2):
        odds = [float(found.candidate.logits(of_each[node, rank][None]).exp()) for rank in range(6)]
        total = sum(odds) + float(found.none.logits(of_none[node]).exp())
        assert chances[node].tolist() == pytest.approx([part / total for part in odds])


def test_a_candidate_is_told_by_its_distance_to_the_best_and_the_node_by_its_first_two() -> None:
    candidates = some_candidates()
    names = ("margin", "log_rank", "lead", "log_first_q", "log_not_covered")
    log_q, log_perturbed = candidates["q"].log(), candidates["perturbed"].log()
    found = network_features(names, read_inputs(candidates))
    expected = (
        log_perturbed[0, 2] - log_perturbed[0, 0],
        math.log(3),
        log_perturbed[0, 0] - log_perturbed[0, 1],
        log_q[0, 0],
        (1 - candidates["perturbed"][0].sum()).log(),
    )
    assert found[0, 2].tolist() == pytest.approx([float(value) for value in expected])


def test_where_no_token_is_left_nothing_is_accepted() -> None:
    chances = model().candidate_acceptance(some_candidates())
    assert chances[2, 2:].count_nonzero() == 0
    assert bool((chances[2, :2] > 0).all())
    assert chances.isfinite().all()


@pytest.mark.parametrize("shift", [-2.0, -0.3, 0.0, 0.7])
def test_a_shift_moves_the_odds_of_any_candidate_against_none(shift: float) -> None:
    def odds(found: AcceptanceModel) -> Tensor:
        chances = found.candidate_acceptance(some_candidates())[:2]
        return (chances / (1 - chances.sum(-1, keepdim=True))).log()

    torch.testing.assert_close(odds(model().shifted(shift)), odds(model()) + shift)


def test_inputs_are_finite_at_the_ends_of_their_ranges() -> None:
    ends = {name: torch.tensor([[0.0, 1.0]]) for name in COLUMNS} | {"depth": torch.tensor([[1.0, 700.0]])}
    for names in INPUTS.values():
        assert network_features(names, read_inputs(ends)).isfinite().all()


def test_the_built_in_pairs_predictions_are_finite_for_a_draft_that_is_sure() -> None:
    q = torch.nn.functional.one_hot(torch.tensor([3]), VOCAB).float()
    tokens, perturbed = best_children(q, 32, 1 / exponential_noise(1, 2, 3, VOCAB))
    found = candidates_of(q, tokens, perturbed, None, depth=torch.ones(1, 1), temperature=1.0)
    chances = default_acceptance().candidate_acceptance(found)
    assert chances.isfinite().all()
    assert (chances[0] > 0).tolist() == [True] + [False] * 31


def test_rates_by_rank_are_interpolated_within_their_draw() -> None:
    found = model()
    assert found.rank_acceptance(0.5, "coupled") == pytest.approx([0.625, 0.125])
    assert found.rank_acceptance(9.0, "coupled") == [0.75, 0.0]
    assert found.rank_acceptance(0.5, "sampled") == [0.7, 0.1]
    assert found.rank_acceptance(0.5, "chosen") == []


def test_acceptance_survives_its_file(tmp_path: Path) -> None:
    path, found, candidates = tmp_path / "acceptance.json", model(), some_candidates()
    found.save(path)
    loaded = AcceptanceModel.load(path)
    assert loaded.measured == MEASURED
    assert loaded.about == {"target": "big", "draft": "small"}
    torch.testing.assert_close(
        loaded.candidate_acceptance(candidates), found.candidate_acceptance(candidates), atol=1e-3, rtol=0
    )
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()
    assert json.loads(path.read_text())["schema"] == "edgespec.acceptance/2"
    assert max(len(line) for line in path.read_text().splitlines()) < 400  # for people, too


def test_a_file_of_an_older_version_says_how_to_fit_it_again(tmp_path: Path) -> None:
    path = tmp_path / "acceptance.json"
    path.write_text(json.dumps({"schema": "edgespec.acceptance/1", "about": {}, "slot": {}, "measured": []}))
    with pytest.raises(EdgespecError) as caught:
        AcceptanceModel.load(path)
    assert caught.value.code == "E_MODEL_FILE"
    assert caught.value.what == f"'{path}' has schema 'edgespec.acceptance/1', not 'edgespec.acceptance/2'."
    assert caught.value.fix == "Fit it with this version: edgespec train acceptance."


def remove(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.pop(key)


def put(value: Any, *keys: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (put("edgespec.acceptance/3", "schema"), "has schema 'edgespec.acceptance/3'"),
        (remove("schema"), "has schema None"),
        (remove("none"), "none is missing"),
        (put(1, "extra"), "extra is unknown"),
        (put(1, "none", "extra"), "none.extra is unknown"),
        (put([], "none"), "none [] is not an object"),
        (put("gelu", "candidate", "activation"), "candidate.activation"),
        (put([1.0], "candidate", "mean"), "candidate.mean is not of shape"),
        (put(math.nan, "candidate", "mean", 0), "candidate.mean.0 nan is not a finite number"),
        (put(True, "candidate", "mean", 0), "candidate.mean.0 True is not a finite number"),
        (put(0.0, "none", "std", 0), "none.std"),
        (put([], "none", "layers"), "none.layers"),
        (put([[1.0]], "none", "layers", 0, "weight"), "none.layers.0.weight is not of shape"),
        (put(math.inf, "none", "layers", 1, "bias", 0), "none.layers.1.bias.0 inf is not a finite number"),
        (put("luck", "candidate", "inputs", 0), "candidate.inputs names 'luck'"),
        (put("log_q", "none", "inputs", 0), "none.inputs names 'log_q'"),
        (put(3, "none", "inputs"), "none.inputs 3 is not a list"),
        (put("top_k", "measured", 0, "draw"), "measured.0.draw 'top_k' is not 'coupled', 'sampled' or 'chosen'"),
        (put("warm", "measured", 1, "temperature"), "measured.1.temperature 'warm' is not a finite number"),
        (put(["x"], "measured", 1, "rates"), "measured.1.rates.0 'x' is not a finite number"),
        (put(0, "measured", 1, "rates"), "measured.1.rates 0 is not a list"),
        (put({}, "measured"), "measured {} is not a list"),
        (put({"a": 1}, "about"), "about"),
    ],
)
def test_a_file_that_is_not_right_is_refused_by_its_key(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], key: str
) -> None:
    path = tmp_path / "acceptance.json"
    model().save(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(EdgespecError) as caught:
        AcceptanceModel.load(path)
    assert caught.value.code == "E_MODEL_FILE"
    assert key in caught.value.what


def test_files_that_are_none(tmp_path: Path) -> None:
    for load in (AcceptanceModel.load, Classifier.load, StopModel.load):
        with pytest.raises(EdgespecError) as caught:
            load(tmp_path / "none")
        assert caught.value.code == "E_FILE_NOT_FOUND"
    (tmp_path / "text").write_text("{")
    for load in (AcceptanceModel.load, Classifier.load, StopModel.load):
        with pytest.raises(EdgespecError) as caught:
            load(tmp_path / "text")
        assert caught.value.code == "E_MODEL_FILE"
    with pytest.raises(EdgespecError) as caught:
        model().save(tmp_path / "none" / "file.json")
    assert caught.value.code == "E_OUTPUT"


def test_a_classifier_survives_its_file(tmp_path: Path) -> None:
    path, found = tmp_path / "classifier.json", Classifier(network=random_network(CLASSIFIER_INPUTS, 4, hidden=(48,)))
    found.save(path)
    path_probability, entropy = torch.rand(3, 4, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
    confidence = found.confidence(path_probability=path_probability, entropy=entropy, depth=3)
    again = Classifier.load(path).confidence(path_probability=path_probability, entropy=entropy, depth=3)
    torch.testing.assert_close(again, confidence, atol=1e-3, rtol=0)
    one = torch.stack([path_probability[2, 1], entropy[2], torch.tensor(3.0).double()])
    torch.testing.assert_close(found.network(one[None])[0], confidence[2, 1])
    data = json.loads(path.read_text())
    data["network"]["inputs"][0] = "hope"
    path.write_text(json.dumps(data))
    with pytest.raises(EdgespecError, match=r"network\.inputs"):
        Classifier.load(path)


def stop_model(kind: Any, num_inputs: int) -> StopModel:
    return StopModel(kind=kind, network=random_network(input_names(kind, num_inputs), 6, hidden=(7, 3)))


@pytest.mark.parametrize("kind", ["hidden", "probabilities"])
def test_a_decision_model_survives_its_file(tmp_path: Path, kind: Any) -> None:
    path, found = tmp_path / "stop.safetensors", stop_model(kind, 6)
    found.save(path)
    loaded = StopModel.load(path)
    assert (loaded.kind, loaded.num_inputs) == (kind, 6)
    assert loaded.network.inputs == found.network.inputs
    inputs = torch.randn(5, 6)
    torch.testing.assert_close(loaded.predict(inputs), found.predict(inputs))


@pytest.mark.parametrize(
    ("change", "metadata", "key"),
    [
        ({}, None, "schema"),
        ({}, {"kind": "other"}, "kind"),
        ({}, {"activation": "gelu"}, "activation"),
        ({}, {"extra": 1}, "extra"),
        ({"bias.1": None}, {}, "bias.1 is missing"),
        ({"more": torch.zeros(1)}, {}, "more is unknown"),
        ({"weight.1": torch.zeros(3, 6)}, {}, "weight.1 is not of shape"),
        ({"bias.2": torch.zeros(2)}, {}, "bias.2 is not of shape"),
        ({"mean": torch.full((6,), torch.nan)}, {}, "mean has a number that is not finite"),
        ({"std": torch.zeros(6)}, {}, "std has a number that is not above 0"),
    ],
)
def test_a_decision_model_that_is_not_right_is_refused_by_its_key(
    tmp_path: Path, change: dict[str, Tensor | None], metadata: dict[str, Any] | None, key: str
) -> None:
    path = tmp_path / "stop.safetensors"
    stop_model("hidden", 6).save(path)
    tensors = {name: tensor for name, tensor in {**load_file(path), **change}.items() if tensor is not None}
    header = {"schema": "edgespec.stop_model/1", "kind": "hidden", "activation": "relu", **(metadata or {})}
    save_file(tensors, path, metadata=None if metadata is None else {"edgespec": json.dumps(header)})
    with pytest.raises(EdgespecError) as caught:
        StopModel.load(path)
    assert caught.value.code == "E_MODEL_FILE"
    assert key in caught.value.what


class PlainDrafter:
    def begin(self, ids: Sequence[int]) -> None: ...

    def rewind(self) -> None: ...

    def expand(self, tokens: Tensor, parent_rows: Tensor) -> Tensor:
        raise NotImplementedError

    def commit(self, root: int, path_rows: list[int], path_tokens: list[int]) -> None: ...


class DrafterWithStates(PlainDrafter):
    def hidden(self, rows: Tensor) -> Tensor:
        return rows[:, None] * torch.ones(1, 6)


def layer_of(q: Tensor) -> Layer:
    ones = torch.ones(q.shape[0])
    drawn = q[:, :1]
    return Layer(
        depth=1,
        draft_q=q,
        noise=None,
        drawn=torch.zeros_like(drawn, dtype=torch.long),
        q_drawn=drawn,
        values=ones,
        path_probability=ones,
        rows=torch.arange(q.shape[0]),
    )


def test_drafting_stops_when_no_node_looks_likely_enough() -> None:
    q = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    inputs = distribution_inputs(q, 8)
    assert inputs.shape == (4, 8)
    assert torch.equal(inputs[:, :5], q.sort(-1, descending=True).values)
    assert inputs[:, 5:7].count_nonzero() == 0
    by_distribution, by_state = stop_model("probabilities", 8), stop_model("hidden", 6)
    cases = ((by_distribution, inputs), (by_state, DrafterWithStates().hidden(torch.arange(4))))
    for found, features in cases:
        best = float(found.predict(features).max())
        for confidence, expected in ((best + 1e-3, True), (best - 1e-3, False)):
            assert bool(model_exit(found, DrafterWithStates(), confidence=confidence)(layer_of(q)).all()) is expected


def test_a_model_of_hidden_states_needs_them_and_their_width() -> None:
    q = torch.full((2, 5), 0.2)
    with pytest.raises(EdgespecError, match="keeps none"):
        model_exit(stop_model("hidden", 6), PlainDrafter(), confidence=0.4)
    with pytest.raises(EdgespecError, match="reads 9 numbers"):
        model_exit(stop_model("hidden", 9), DrafterWithStates(), confidence=0.4)(layer_of(q))
