"""The small models of growth: what they may read, their files, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from edgespec.errors import EdgespecError
from edgespec.grow.acceptance import INPUTS, AcceptanceModel, Measured, network_features
from edgespec.grow.classifier import INPUTS as CLASSIFIER_INPUTS
from edgespec.grow.classifier import Classifier
from edgespec.grow.growing import Layer
from edgespec.grow.network import Network
from edgespec.grow.stop_model import StopModel, distribution_inputs, input_names, model_exit

TOKEN_INPUTS = ("log_rank", "log_mass_left", "entropy", "log_top_q", "log_depth", "temperature", "log_q",
                "log_conditional")  # fmt: skip
MEASURED = (
    Measured(draw="sampled", temperature=0.0, tokens=4.0, rates=(0.5, 0.25)),
    Measured(draw="sampled", temperature=1.0, tokens=6.0, rates=(0.75,)),
    Measured(draw="chosen", temperature=0.0, tokens=6.0, rates=(0.7, 0.1)),
    Measured(draw="chosen", temperature=1.0, tokens=2.0, rates=(0.3, 0.2)),
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
        "slot": random_network(TOKEN_INPUTS[:6], 0),
        "sampled": random_network(TOKEN_INPUTS, 1),
        "chosen": random_network(TOKEN_INPUTS, 2),
        "measured": MEASURED,
        "about": {"target": "big", "draft": "small"},
    }
    return AcceptanceModel(**{**parts, **changes})


def some_slots(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    dist = torch.randn(3, 9, generator=generator, dtype=dtype).softmax(-1)
    q = dist[:, :4]
    return {
        "q": q,
        "mass_left": 1 - (q.cumsum(1) - q),
        "entropy": torch.rand(3, generator=generator, dtype=dtype),
        "top_q": dist.amax(-1),
        "depth": 2,
        "temperature": 0.6,
    }


def without_q(slots: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in slots.items() if name != "q"}


def test_a_network_is_its_formula() -> None:
    network = random_network(("a", "b", "c"), 3)
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    hidden = torch.tanh((x - network.mean) / network.std @ network.weights[0].T + network.biases[0])
    expected = torch.sigmoid(hidden @ network.weights[1].T + network.biases[1])[..., 0]
    torch.testing.assert_close(network(x), expected)
    assert network(x.float()).dtype == torch.float32
    torch.testing.assert_close(network(x.float()).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("draw", ["sampled", "top_k"])
def test_predictions_are_those_of_one_slot_at_a_time(draw: Any) -> None:
    slots, found = some_slots(), model()
    tokens = found.token_acceptance(draw=draw, **slots)
    before = found.slot_acceptance(**without_q(slots))
    assert tokens.shape == before.shape == (3, 4)
    assert tokens.dtype == before.dtype == torch.float64
    for row in range(3):
        for rank in range(4):
            one = {
                "rank": torch.tensor(float(rank)),
                "depth": torch.tensor(2.0),
                "temperature": torch.tensor(0.6),
                "entropy": slots["entropy"][row],
                "top_q": slots["top_q"][row],
                "mass_left": slots["mass_left"][row, rank],
                "q": slots["q"][row, rank],
            }
            one = {name: value.double() for name, value in one.items()}
            network = found.chosen if draw == "chosen" else found.sampled
            torch.testing.assert_close(tokens[row, rank], network(network_features(network.inputs, one)[None])[0])
            torch.testing.assert_close(before[row, rank], found.slot(network_features(found.slot.inputs, one)[None])[0])


def test_slots_are_judged_without_their_own_token() -> None:
    """Mass left before a slot says what was drawn earlier; nothing that is passed depends on its token."""
    slots, found = some_slots(), model()
    before = found.slot_acceptance(**without_q(slots))
    q = slots["q"].clone()
    q[:, 2] *= 0.5  # another token in the third slot
    changed = found.slot_acceptance(**{**without_q(slots), "mass_left": 1 - (q.cumsum(1) - q)})
    assert torch.equal(before[:, :3], changed[:, :3])
    assert not torch.equal(before[:, 3], changed[:, 3])


def test_where_no_token_is_left_nothing_is_accepted() -> None:
    slots = some_slots()
    slots["q"][1, 3] = 0
    found = model().token_acceptance(draw="sampled", **slots)
    assert found[1, 3] == 0
    assert found.isfinite().all()


def test_inputs_are_finite_at_the_ends_of_their_ranges() -> None:
    ends = {name: torch.tensor([0.0, 1.0]) for name in ("rank", "mass_left", "entropy", "top_q", "temperature", "q")}
    assert network_features(tuple(INPUTS), {**ends, "depth": torch.tensor([1.0, 700.0])}).isfinite().all()


def test_the_better_draw_is_interpolated_and_ties_are_sampled() -> None:
    found = model()
    assert found.expected_tokens(0.25, "sampled") == pytest.approx(4.5)
    assert found.expected_tokens(9.0, "top_k") == 2.0
    assert [found.better_draw(at) for at in (0.0, 0.2, 0.5, 2.0)] == ["top_k", "top_k"] + ["sampled"] * 2
    tie = found.expected_tokens(1 / 3, "top_k")
    assert tie == pytest.approx(found.expected_tokens(1 / 3, "sampled"))
    nothing = model(measured=())
    assert nothing.expected_tokens(0.0, "top_k") is None
    assert nothing.better_draw(0.0) == "sampled"
    assert model(measured=MEASURED[2:]).better_draw(1.0) == "top_k"


def test_rates_by_rank_are_interpolated() -> None:
    found = model()
    assert found.rank_acceptance(0.5, "sampled") == pytest.approx([0.625, 0.125])
    assert model(measured=()).rank_acceptance(0.5, "top_k") == []


def test_acceptance_survives_its_file(tmp_path: Path) -> None:
    path, found, slots = tmp_path / "acceptance.json", model(), some_slots()
    found.save(path)
    loaded = AcceptanceModel.load(path)
    assert loaded.measured == MEASURED
    assert loaded.about == {"target": "big", "draft": "small"}
    for draw in ("sampled", "chosen"):
        torch.testing.assert_close(
            loaded.token_acceptance(draw=draw, **slots), found.token_acceptance(draw=draw, **slots), atol=1e-3, rtol=0
        )
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()
    assert json.loads(path.read_text())["schema"] == "edgespec.acceptance/1"
    assert max(len(line) for line in path.read_text().splitlines()) < 200  # for people, too


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
        (put("edgespec.acceptance/2", "schema"), "schema is not 'edgespec.acceptance/1'"),
        (remove("slot"), "slot is missing"),
        (put(1, "extra"), "extra is unknown"),
        (put(1, "slot", "extra"), "slot.extra is unknown"),
        (put([], "slot"), "slot is no object"),
        (put("gelu", "chosen", "activation"), "chosen.activation"),
        (put([1.0], "chosen", "mean"), "chosen.mean is not of shape"),
        (put(math.nan, "chosen", "mean", 0), "chosen.mean is no finite number"),
        (put(True, "chosen", "mean", 0), "chosen.mean is no finite number"),
        (put(0.0, "sampled", "std", 0), "sampled.std"),
        (put([], "sampled", "layers"), "sampled.layers"),
        (put([[1.0]], "sampled", "layers", 0, "weight"), "sampled.layers.0.weight is not of shape"),
        (put(math.inf, "sampled", "layers", 1, "bias", 0), "sampled.layers.1.bias is no finite number"),
        (put("luck", "sampled", "inputs", 0), "sampled.inputs names 'luck'"),
        (put("log_q", "slot", "inputs", 0), "slot.inputs names 'log_q'"),
        (put(3, "slot", "inputs"), "slot.inputs is no list of names"),
        (put("both", "measured", 0, "draw"), "measured.0.draw"),
        (put("many", "measured", 1, "tokens"), "measured.1.tokens is no finite number"),
        (put(["x"], "measured", 1, "rates"), "measured.1.rates.0 is no finite number"),
        (put(0, "measured", 1, "rates"), "measured.1.rates is no list"),
        (put({}, "measured"), "measured is no list"),
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
    def prefill(self, ids: Tensor, *, capacity: int) -> None: ...

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
        q=q,
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
            assert bool(model_exit(found, DrafterWithStates(), confidence=confidence)(layer_of(q))) is expected


def test_a_model_of_hidden_states_needs_them_and_their_width() -> None:
    q = torch.full((2, 5), 0.2)
    with pytest.raises(EdgespecError, match="keeps none"):
        model_exit(stop_model("hidden", 6), PlainDrafter(), confidence=0.4)
    with pytest.raises(EdgespecError, match="reads 9 numbers"):
        model_exit(stop_model("hidden", 9), DrafterWithStates(), confidence=0.4)(layer_of(q))
