"""A draft of the target's own layers is the target where it has all of them, and is trained on real rows alone."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from edgespec.pair.folder import open_model
from edgespec.train.feature_files import FeatureBatch
from edgespec.train.training_loop import TrainingRun
from scripts.papers.compare_policies import Bench, Fits
from scripts.papers.heads.heads import TARGET
from scripts.papers.published import timed
from scripts.papers.published.layers import draft_config, new_layers, of_rows
from scripts.papers.published.prompts import SUBJECTS, prompts
from tests.support.plain_weights import weights_of

IDS = torch.tensor([[11, 40, 7, 300, 25, 90, 3, 512], [5, 6, 7, 0, 0, 0, 0, 0]])


@torch.no_grad()
def test_all_layers_are_the_target() -> None:
    target = open_model(TARGET)
    config = draft_config(target.config, target.config.num_hidden_layers)
    draft = new_layers(weights_of(target), config, range(config.num_hidden_layers))
    plain = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    torch.testing.assert_close(draft(IDS).logits, plain(IDS).logits)


@torch.no_grad()
def test_layers_learn_from_tokens_alone_each_with_its_own_feature() -> None:
    target = open_model(TARGET)
    draft = new_layers(weights_of(target), draft_config(target.config, 2), [0, 7])
    features = torch.arange(16.0)[:, None].expand(-1, target.config.hidden_size).view(2, 8, -1)
    batch = FeatureBatch(ids=IDS, lengths=torch.tensor([8, 3]), features=features)
    hidden, of_target = (torch.cat(parts) for parts in zip(*of_rows(draft, batch), strict=True))
    assert of_target[:, 0].tolist() == [*range(8), 8, 9, 10]
    alone = draft.get_decoder()(input_ids=IDS[1:, :3]).last_hidden_state[0]
    torch.testing.assert_close(hidden[8:], alone, rtol=1e-4, atol=1e-4)


def test_a_run_that_was_stopped_goes_on_with_the_steps_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timed, "FeatureFiles", lambda folder: folder)
    now = [0.0]
    monkeypatch.setattr(timed.time, "process_time", lambda: now[0])
    given = argparse.Namespace(out=tmp_path, seconds=5.0, learning_rate=None, seed=0)
    asked: list[int] = []

    def learn(made: list[int], run: TrainingRun) -> None:
        asked.append(run.settings.training_steps)
        for step in range(asked[-1]):
            is_last = step + 1 == asked[-1]
            now[0] += 0.25 + 100 * is_last  # a look at held-out texts
            assert run.progress is not None
            run.progress(step + 1, {"loss": 1.0}, {"agreement": 0.5} if is_last else None)
        made.append(asked[-1])

    assert timed.train_timed(given, "one", list, learn, width=256) == [20]
    assert asked == [timed.TIMED_STEPS, 20]
    assert timed.train_timed(given, "one", list, learn, width=256) == [20]  # nothing is timed again
    assert asked == [timed.TIMED_STEPS, 20, 20]
    assert len((tmp_path / "one.curve.jsonl").read_text().splitlines()) == 2  # none of the timed steps


def test_held_out_prompts_are_of_other_subjects() -> None:
    known, held_out = (prompts(is_held_out=which) for which in (False, True))
    assert not set(known) & set(held_out)
    assert not any(SUBJECTS[-1] in prompt or SUBJECTS[-2] in prompt for prompt in known)


def test_a_bench_takes_what_is_fitted_on_its_pair(tmp_path: Path) -> None:
    from edgespec import TreeSettings
    from edgespec.grow.acceptance import DEFAULT_FILE

    document = json.loads(DEFAULT_FILE.read_text(encoding="utf-8"))
    document["about"] = {"pair": "another"}
    (tmp_path / "own.json").write_text(json.dumps(document), encoding="utf-8")
    bench = Bench(None, None, 0, fits=Fits(acceptance=tmp_path / "own.json"))
    assert bench.policy(TreeSettings(policy="sequoia", size=8)).acceptance is bench.acceptance
    assert bench.acceptance.about["pair"] == "another"
    bench.engine.close()
