"""Training goes on as if it had never stopped, refuses NaN, and makes heads that agree with their target."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from edgespec import EdgespecError
from edgespec.draft.head_router import group_tokens
from edgespec.train import training_loop
from edgespec.train.feature_files import FeatureFiles
from edgespec.train.head_model import own_tensors
from edgespec.train.head_objective import LossWeights, Precision, head_logits, held_out_agreement
from edgespec.train.head_steps import head_steps
from edgespec.train.head_training import METHODS, train_head
from edgespec.train.router_training import _target_groups, check_groups, train_router
from edgespec.train.training_loop import CHECKPOINT, TrainingReport, TrainingRun, batch_blocks, split_blocks
from edgespec.train.training_settings import TrainingSettings
from tests.edgespec.train.heads import feature_files, features_of, make_head, make_target, random_texts
from tests.support.families import VOCAB

PLAIN = Precision(is_mixed=False)
BORROWING = ("eagle", "hass", "coral")  # methods of heads that borrow the target's own head
SETTINGS = TrainingSettings(
    training_steps=12, batch_blocks=3, learning_rate=1e-2, warmup_steps=2, evaluate_every=5, checkpoint_every=4
)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target()


@pytest.fixture
def files(target: PreTrainedModel, tmp_path: Path) -> FeatureFiles:
    return feature_files(tmp_path / "f", target, random_texts([24, 24, 20, 24, 17, 24, 24, 12]))


def trained(
    head: PreTrainedModel, files: FeatureFiles, folder: Path, *, method: str = "coral", **changes: object
) -> TrainingReport:
    progress = changes.pop("progress", None)
    noise = changes.pop("feature_noise", METHODS[method].feature_noise)
    settings = dataclasses.replace(SETTINGS, **changes)
    return train_head(
        head,
        dataclasses.replace(METHODS[method], feature_noise=noise),
        run=TrainingRun(files=files, settings=settings, folder=folder, identity="x", progress=progress),
        precision=PLAIN,
    )


@pytest.mark.parametrize("method", BORROWING)
def test_losses_fall_and_only_the_heads_own_weights_change(
    method: str, target: PreTrainedModel, files: FeatureFiles, tmp_path: Path
) -> None:
    before = {name: tensor.clone() for name, tensor in target.named_parameters()}
    head = make_head(target)
    losses: list[dict[str, float]] = []
    evaluations: list[int] = []

    def progress(step: int, found: dict[str, float], held_out: object) -> None:
        losses.append(found)
        evaluations.extend([step] if held_out else [])

    report = trained(head, files, tmp_path / "t", method=method, training_steps=40, progress=progress)
    assert losses[-1]["loss"] < 0.8 * losses[0]["loss"]
    assert ("alignment" in losses[0]) == (method == "coral")
    assert ("top_tokens" in losses[0]) == (method == "hass")
    assert ("alignment_weight" in report.held_out) == (method == "coral")
    assert evaluations == [5, 10, 15, 20, 25, 30, 35, 40]
    assert all(torch.equal(before[name], tensor) for name, tensor in target.named_parameters())
    assert report.num_blocks + report.num_held_out == files.num_blocks


def test_a_run_that_was_interrupted_ends_in_the_same_numbers(
    target: PreTrainedModel, files: FeatureFiles, tmp_path: Path
) -> None:
    """Bit for bit, from a checkpoint two steps before the interruption, in the third epoch."""
    whole = make_head(target)
    whole_report = trained(whole, files, tmp_path / "whole")
    fresh = {name: tensor.clone() for name, tensor in own_tensors(make_head(target)).items()}

    def interrupt(step: int, *_: object) -> None:
        if step == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(make_head(target), files, tmp_path / "t", progress=interrupt)
    steps: list[int] = []
    again = make_head(target)
    report = trained(again, files, tmp_path / "t", progress=lambda step, *_: steps.append(step))
    assert steps == [9, 10, 11, 12]
    assert report == whole_report
    for name, tensor in own_tensors(again).items():
        assert torch.equal(tensor, own_tensors(whole)[name]), name
        assert not torch.equal(tensor, fresh[name]), name
    assert trained(again, files, tmp_path / "t") == whole_report, "nothing is left to do"


def test_every_step_has_noise_of_its_own_which_the_seed_fixes(
    target: PreTrainedModel, files: FeatureFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but noise differs: the head does not learn, and every batch is the same."""
    losses: dict[str, list[float]] = {}
    monkeypatch.setattr(training_loop, "batch_blocks", lambda *_: [0, 1])
    for name, changes in {"a": {}, "again": {}, "other": {"seed": 1}, "none": {"feature_noise": 0.0}}.items():
        losses[name] = []
        trained(
            make_head(target), files, tmp_path / name, method="eagle", learning_rate=0.0,
            progress=lambda _step, found, _: losses[name].append(found["loss"]), **changes,  # noqa: B023
        )  # fmt: skip
    assert len(set(losses["a"])) == len(losses["a"]) == 12
    assert losses["a"] == losses["again"]
    assert not set(losses["a"]) & set(losses["other"])
    assert len(set(losses["none"])) == 1


def test_what_is_held_out_is_measured_without_noise(
    target: PreTrainedModel, files: FeatureFiles, tmp_path: Path
) -> None:
    head = make_head(target)
    report = trained(head, files, tmp_path / "t", method="hass", feature_noise=1.0)
    held_out = split_blocks(files, SETTINGS).held_out
    assert report.held_out == held_out_agreement(head, files, held_out, batch_blocks=3, precision=PLAIN)


def test_csra_cannot_be_balanced_with_a_loss_of_no_weight() -> None:
    weights = LossWeights(regression=0.0, alignment=None)
    with pytest.raises(EdgespecError, match="whose weight is 0"):
        dataclasses.replace(METHODS["coral"], weights=weights)
    dataclasses.replace(METHODS["coral"], weights=dataclasses.replace(weights, alignment=0.1))
    with pytest.raises(EdgespecError, match="cannot be trained so"):
        dataclasses.replace(METHODS["coral"], feature_noise=-0.1)


def test_the_methods_weights_are_the_papers() -> None:
    """EAGLE: 1 and 0.1; HASS: its top-K loss beside them; CORAL: half the regression, and no top-K loss."""
    weights = {name: dataclasses.astuple(METHODS[name].weights)[:4] for name in BORROWING}
    assert weights == {"eagle": (1.0, 0.1, 0.0, 0.0), "hass": (1.0, 0.1, 1.0, 0.0), "coral": (0.5, 0.1, 0.0, None)}
    assert {METHODS[name].feature_noise for name in BORROWING} == {0.1}


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"learning_rate": 1e-4}, {"training_steps": 13}, {"method": "hass"}, {"feature_noise": 0.2}]
)
def test_a_checkpoint_of_another_run_is_refused(
    change: dict[str, object], target: PreTrainedModel, files: FeatureFiles, tmp_path: Path
) -> None:
    trained(make_head(target), files, tmp_path / "t")
    with pytest.raises(EdgespecError, match="another run") as caught:
        trained(make_head(target), files, tmp_path / "t", **change)
    assert caught.value.code == "E_CHECKPOINT"


def test_a_damaged_checkpoint_is_refused(target: PreTrainedModel, files: FeatureFiles, tmp_path: Path) -> None:
    trained(make_head(target), files, tmp_path / "t")
    path = tmp_path / "t" / CHECKPOINT
    for content in (path.read_bytes()[:500], b"", b"nothing of the kind"):
        path.write_bytes(content)
        with pytest.raises(EdgespecError, match="damaged") as caught:
            trained(make_head(target), files, tmp_path / "t")
        assert caught.value.code == "E_CHECKPOINT"


def test_nan_ends_the_run_by_its_step_and_leaves_the_last_good_checkpoint(
    target: PreTrainedModel, files: FeatureFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(make_head(target), files, tmp_path / "right", training_steps=12)
    steps: list[int] = []
    right = training_loop.batch_blocks

    def batches(*arguments: object) -> list[int]:
        steps.append(1)
        return right(*arguments)

    batch = FeatureFiles.batch

    def damaged(self: FeatureFiles, indices: list[int], **named: torch.device) -> object:
        found = batch(self, indices, **named)
        if len(steps) == 7:
            found.features[0, 3, 0] = torch.inf
        return found

    monkeypatch.setattr(training_loop, "batch_blocks", batches)
    monkeypatch.setattr(FeatureFiles, "batch", damaged)
    head = make_head(target)
    with pytest.raises(EdgespecError, match="step 7") as caught:
        trained(head, files, tmp_path / "t", evaluate_every=100)
    assert caught.value.code == "E_TRAIN_NAN"
    assert all(bool(tensor.isfinite().all()) for tensor in own_tensors(head).values())
    content = torch.load(tmp_path / "t" / CHECKPOINT, weights_only=True)
    assert content["step"] == 4
    assert all(bool(tensor.isfinite().all()) for tensor in content["weights"].values())
    assert "checkpoint" in caught.value.what


def test_a_gradient_that_is_not_finite_is_refused_too(files: FeatureFiles, tmp_path: Path) -> None:
    """The root's slope at 0 is infinite, its value is not."""
    weight = torch.zeros(1, requires_grad=True)
    with pytest.raises(EdgespecError, match="step 1") as caught:
        training_loop.train(
            {"weight": weight},
            lambda _, _generator: {"loss": weight.sqrt().sum()},
            run=TrainingRun(files=files, settings=SETTINGS, folder=tmp_path, identity="x"),
        )
    assert caught.value.code == "E_TRAIN_NAN"
    assert weight.tolist() == [0.0]


def test_every_epoch_has_every_block_once_in_an_order_of_its_own() -> None:
    settings = dataclasses.replace(SETTINGS, batch_blocks=3)
    blocks = list(range(100, 112))
    epochs = [[batch_blocks(blocks, settings, 4 * epoch + part) for part in range(4)] for epoch in range(3)]
    flat = [[block for batch in epoch for block in batch] for epoch in epochs]
    assert all(sorted(order) == blocks for order in flat)
    assert len({tuple(order) for order in flat}) == 3
    other = dataclasses.replace(settings, seed=1)
    assert [block for part in range(4) for block in batch_blocks(blocks, other, part)] != flat[0]
    assert batch_blocks([7, 8], settings, 5) in ([7, 8], [8, 7]), "fewer blocks than a batch has"


def test_held_out_texts_are_not_trained_on(files: FeatureFiles, target: PreTrainedModel, tmp_path: Path) -> None:
    split = split_blocks(files, SETTINGS)
    assert sorted([*split.train, *split.held_out]) == list(range(8))
    assert not {int(files.texts[index]) for index in split.train} & {int(files.texts[i]) for i in split.held_out}
    one = feature_files(tmp_path / "one", target, random_texts([20]))
    with pytest.raises(EdgespecError, match="one block"):
        split_blocks(one, SETTINGS)


def test_the_learning_rate_falls_with_the_width_unless_one_is_given() -> None:
    assert TrainingSettings().for_width(256).learning_rate == pytest.approx(3e-3, rel=0.03)
    assert TrainingSettings().for_width(4096).learning_rate == pytest.approx(1.8e-4, rel=0.03)
    assert TrainingSettings(learning_rate=0.5).for_width(4096).learning_rate == 0.5


def test_the_rate_warms_up_and_falls_to_nothing() -> None:
    settings = TrainingSettings(training_steps=10, warmup_steps=4, learning_rate=1.0)
    rates = [settings.rate(step) for step in range(10)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert settings.rate(10) == pytest.approx(0)
    assert dataclasses.replace(settings, decay="linear").rate(7) == pytest.approx(0.5)
    with pytest.raises(EdgespecError):
        TrainingSettings(training_steps=0)


def brute_force_length(head: PreTrainedModel, files: FeatureFiles, blocks: list[int]) -> float:
    """1 and the tokens in a row on which head and target agree, from every start with room for four."""
    lengths = []
    for index in blocks:
        batch = files.batch([index], device=torch.device("cpu"))
        choice: Callable[[Tensor], Tensor] = lambda features: head_logits(head)(features).argmax(-1)  # noqa: E731
        right = choice(batch.features[0])
        steps = [choice(step[0]) for step in head_steps(head, batch, num_steps=4)]
        for start in range(int(batch.lengths) - 3):
            length = 1
            while length < 5 and steps[length - 1][start + length - 1] == right[start + length - 1]:
                length += 1
            lengths.append(length)
    return sum(lengths) / len(lengths)


def test_acceptance_length_by_brute_force(target: PreTrainedModel, files: FeatureFiles, tmp_path: Path) -> None:
    head = make_head(target)
    trained(head, files, tmp_path / "t", training_steps=150, learning_rate=2e-3)
    blocks = list(range(8))
    found = held_out_agreement(head, files, blocks, batch_blocks=3, precision=PLAIN)
    with torch.no_grad():
        expected = brute_force_length(head, files, blocks)
    assert 1.2 < expected < 5, "neither nothing nor all of it"
    assert found["acceptance_length"] == pytest.approx(expected)
    with torch.no_grad():
        logits = [head_logits(head)(head_steps(head, files.batch([i], device=torch.device("cpu")), num_steps=1)[0][0])
                  for i in blocks]  # fmt: skip
        rights = [head_logits(head)(files.block(i)[1]).argmax(-1) for i in blocks]
    same = [bool(a) for row, right in zip(logits, rights, strict=True) for a in row.argmax(-1) == right]
    assert found["agreement_1"] == pytest.approx(sum(same) / len(same))


def test_a_router_learns_the_targets_groups_and_leaves_the_head(tmp_path: Path) -> None:
    """Of a target that is sure of its groups: there is something to learn."""
    target = make_target("mistral")
    with torch.no_grad():
        target.lm_head.weight.mul_(8)
    files = feature_files(tmp_path / "f", target, random_texts([24] * 8))
    head = make_head(target, router_groups=8, top_groups=2)
    trained(head, files, tmp_path / "h", method="hass", training_steps=60, learning_rate=2e-3)
    before = {name: tensor.detach().clone() for name, tensor in own_tensors(head).items()}
    losses: list[float] = []
    settings = dataclasses.replace(SETTINGS, training_steps=250, learning_rate=1e-2)
    report = train_router(
        head,
        run=TrainingRun(
            files=files,
            settings=settings,
            folder=tmp_path / "r",
            identity="x",
            progress=lambda _step, found, _: losses.append(found["loss"]),
        ),
        num_steps=3,
        precision=PLAIN,
    )
    assert losses[-1] < 0.9 * losses[0]
    for name, tensor in own_tensors(head).items():
        assert torch.equal(before[name], tensor) != name.startswith("router."), name
    assert 0 < report.held_out["least_cross_entropy"] <= report.held_out["cross_entropy"]
    assert 0 < report.held_out["mass_kept"] <= 1


def test_what_a_router_learns_is_the_sum_of_the_targets_probabilities(target: PreTrainedModel) -> None:
    """257 tokens in 8 groups of 33: the last one has 26."""
    head = make_head(target)
    features = features_of(target, random_texts([200])[0])
    groups, choices = _target_groups(head, features, 8)
    p = target.lm_head(features).softmax(-1)
    for group in range(8):
        which = group_tokens(group, vocab=VOCAB, num_groups=8)
        torch.testing.assert_close(groups[:, group], p[:, which].sum(-1))
        assert ((choices == group) == ((p.argmax(-1) >= which.start) & (p.argmax(-1) < which.stop))).all()
    torch.testing.assert_close(groups.sum(-1), torch.ones(200))


@pytest.mark.parametrize(
    ("groups", "top", "named"), [(100, 1, "`num_groups=86`"), (300, 1, "empty"), (8, 9, "`top_groups`")]
)
def test_groups_that_would_be_empty_are_refused(groups: int, top: int, named: str) -> None:
    with pytest.raises(EdgespecError, match=named):
        check_groups(VOCAB, groups, top)
    check_groups(VOCAB, 86, 1)
    check_groups(VOCAB, 257, 2)
