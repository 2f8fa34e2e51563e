"""Features in groups are those of plain forwards, in one pass over the weights a group, and survive interruptions."""

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from edgespec import EdgespecError, Engine, MemoryLimits, TreeSettings
from edgespec.model.causal_model import CausalModel
from edgespec.pair.pair import ModelPair, open_pair
from edgespec.placement.memory import texts_bytes
from edgespec.placement.pair_setup import set_up
from edgespec.placement.pair_sizes import PairSizes
from edgespec.placement.place import Memory
from edgespec.placement.run_config import RunConfig
from edgespec.train import features
from edgespec.train.feature_files import FeatureFiles, FeatureRun, read_run
from edgespec.train.features import collect_features, cut_blocks, dataset_bytes, feature_run, place_groups
from offload.stream import LayerStream
from tests.edgespec.train.heads import CPU, features_of, random_texts
from tests.support.families import EAGER_ONLY, FAMILIES, GROUPED, make_model, save_folder

LENGTHS = [30, 8, 21, 70, 16, 33]  # the longest is two blocks of 32 and an end that is dropped


def place_with(limits: MemoryLimits, *, block_tokens: int) -> RunConfig:
    return RunConfig(
        device=CPU, dtype=torch.float32, limits=limits, context_tokens=block_tokens, prompt_tokens=block_tokens
    )


def pair_of(folder: Path) -> ModelPair:
    return dataclasses.replace(open_pair(folder, None), draft=None)


def expected_of(folder: Path, blocks: list[features.Block]) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return [features_of(model, block.ids) for block in blocks]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_group_is_the_plain_forward_of_each_text(family: str) -> None:
    """With chunks of one, of two and of all texts; windows are shorter than the texts."""
    config = FAMILIES[family]()
    config._attn_implementation = "eager" if family in EAGER_ONLY else "sdpa"
    assert_features_are_plain(make_model(config))


def assert_features_are_plain(
    model: PreTrainedModel, *, text_by_text: bool = False, lengths: Sequence[int] = (20, 17, 20, 8, 5)
) -> None:
    texts = random_texts([*lengths])
    expected = [features_of(copy.deepcopy(model), text) for text in texts]
    model._supports_attention_backend = not text_by_text
    for chunk_rows in (16, 40, 512):
        causal = CausalModel(copy.deepcopy(model), device=CPU, chunk_rows=chunk_rows)
        for features_of_text, plain in zip(
            causal.features_of_texts([torch.tensor(text) for text in texts]), expected, strict=True
        ):
            torch.testing.assert_close(features_of_text, plain, rtol=1e-4, atol=2e-5)


def test_a_group_of_a_family_with_attention_of_its_own_is_read_text_by_text() -> None:
    config = FAMILIES["llama"]()
    config._attn_implementation = "eager"  # which takes any mask
    assert_features_are_plain(make_model(config), text_by_text=True)


def test_a_group_whose_rotation_depends_on_the_longest_is_read_text_by_text() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    config = LlamaConfig(**{**GROUPED, "max_position_embeddings": 12}, rope_parameters=rope)
    # Ascending: a shorter text behind a longer one keeps the longer one's rotation in transformers itself.
    assert_features_are_plain(make_model(config), lengths=(5, 8, 17, 20))


def test_a_layer_sees_no_more_texts_than_a_chunk_has() -> None:
    model = make_model(FAMILIES["llama"]())
    causal = CausalModel(model, device=CPU, chunk_rows=50)
    shapes: list[tuple[int, ...]] = []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda _, arguments: shapes.append(arguments[0].shape[:2]))
    causal.features_of_texts([torch.ones(20, dtype=torch.long)] * 5)
    assert shapes == [(1, 40), (1, 40), (1, 20)]


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3"])
def test_streamed_under_a_limit_one_pass_serves_a_group(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save_folder(tmp_path / "target", make_model(FAMILIES[family]()))
    blocks = cut_blocks(random_texts(LENGTHS), block_tokens=32)
    pair = pair_of(target)
    limits = MemoryLimits(max_cpu_bytes=512 << 20, max_resident_layers=0)
    run = feature_run(pair.target, blocks, block_tokens=32, dtype=torch.float32, quant=None)
    run_config = place_with(limits, block_tokens=32)
    sizes = PairSizes(pair, run_config, memory=place_groups(pair.target.config, run_config).memory)
    acquired: list[int] = []
    acquire = LayerStream.acquire
    monkeypatch.setattr(LayerStream, "acquire", lambda self, layer: (acquired.append(layer), acquire(self, layer))[1])
    with Engine(set_up(pair, run_config, TreeSettings(policy="none"), sizes=sizes)) as engine:
        del acquired[:]
        collect_features(engine.target_model, blocks, tmp_path / "f", run, group_rows=96)
    files = FeatureFiles(tmp_path / "f")
    assert [int(length) for length in files.lengths] == [32, 32, 32, 30, 21, 16, 8]
    assert acquired == [0, 1, 2] * 3, "two groups of three blocks, and a block of 8"
    for index, (block, expected) in enumerate(zip(blocks, expected_of(target, blocks), strict=True)):
        ids, found = files.block(index)
        assert ids.tolist() == block.ids
        assert int(files.texts[index]) == block.text
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


@pytest.fixture
def small(tmp_path: Path) -> tuple[CausalModel, list[features.Block], FeatureRun]:
    folder = save_folder(tmp_path / "target", make_model(FAMILIES["llama"]()))
    pair = pair_of(folder)
    blocks = cut_blocks(random_texts(LENGTHS), block_tokens=32)
    run = feature_run(pair.target, blocks, block_tokens=32, dtype=torch.float32, quant=None)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return CausalModel(model, device=CPU), blocks, run


def test_it_goes_on_where_it_was_interrupted(
    small: tuple[CausalModel, list[features.Block], FeatureRun], tmp_path: Path
) -> None:
    causal, blocks, run = small

    def interrupted(done: int, _total: int) -> None:
        if done >= 64:
            raise KeyboardInterrupt

    collect_features(causal, blocks, tmp_path / "whole", run, group_rows=64)
    with pytest.raises(KeyboardInterrupt):
        collect_features(causal, blocks, tmp_path / "f", run, group_rows=64, progress=interrupted)
    assert FeatureFiles(tmp_path / "f").num_blocks == 2
    (tmp_path / "f" / "features-00001.partial").write_bytes(b"torn")
    announced: list[int] = []
    collect_features(
        causal, blocks, tmp_path / "f", run, group_rows=96, announce=lambda _, left, __: announced.append(left)
    )
    assert announced == [int(dataset_bytes(run) * (1 - 64 / run.num_tokens))]
    whole, found = FeatureFiles(tmp_path / "whole"), FeatureFiles(tmp_path / "f")
    assert torch.equal(whole.texts, found.texts)
    for index in range(len(blocks)):
        torch.testing.assert_close(whole.block(index), found.block(index))
    collect_features(causal, blocks, tmp_path / "f", run, group_rows=96, announce=lambda *_: pytest.fail("all there"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"blocks_sha256": "other"}, "other texts"),
        ({"target_fingerprint": "other"}, "target_fingerprint"),
        ({"dtype": "bfloat16"}, "another run"),
        ({"quant": "nf4"}, "nf4"),
    ],
)
def test_another_run_is_refused(
    change: dict[str, str], named: str, small: tuple[CausalModel, list[features.Block], FeatureRun], tmp_path: Path
) -> None:
    causal, blocks, run = small
    collect_features(causal, blocks, tmp_path / "f", run, group_rows=64)
    with pytest.raises(EdgespecError, match=named) as caught:
        collect_features(causal, blocks, tmp_path / "f", dataclasses.replace(run, **change), group_rows=64)
    assert caught.value.code == "E_FEATURES"
    assert read_run(tmp_path / "f") == run


def test_the_size_is_announced_and_a_full_disk_refused_before_anything_is_computed(
    small: tuple[CausalModel, list[features.Block], FeatureRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    causal, blocks, run = small
    collect_features(causal, blocks, tmp_path / "f", run, group_rows=64)
    written = sum(path.stat().st_size for path in (tmp_path / "f").glob("*.safetensors"))
    assert dataset_bytes(run) <= written <= dataset_bytes(run) + 4 * 400, "but for headers"
    monkeypatch.setattr(features.shutil, "disk_usage", lambda _: type("Usage", (), {"free": dataset_bytes(run) - 1})())
    monkeypatch.setattr(CausalModel, "features_of_texts", lambda *_: pytest.fail("computed"))
    with pytest.raises(EdgespecError, match="are free") as caught:
        collect_features(causal, blocks, tmp_path / "g", run, group_rows=64)
    assert caught.value.code == "E_OUTPUT"


def test_features_that_are_not_finite_are_refused(
    small: tuple[CausalModel, list[features.Block], FeatureRun], tmp_path: Path
) -> None:
    causal, blocks, run = small
    with torch.no_grad():
        causal.model.model.norm.weight[3] = torch.nan
    with pytest.raises(EdgespecError, match="NaN") as caught:
        collect_features(causal, blocks, tmp_path / "f", run, group_rows=64)
    assert caught.value.code == "E_NAN_LOGITS"
    assert FeatureFiles(tmp_path / "f").num_blocks == 0


def test_a_damaged_shard_is_named(small: tuple[CausalModel, list[features.Block], FeatureRun], tmp_path: Path) -> None:
    causal, blocks, run = small
    collect_features(causal, blocks, tmp_path / "f", run, group_rows=64)
    shard = tmp_path / "f" / "features-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(EdgespecError, match="features-00001") as caught:
        FeatureFiles(tmp_path / "f")
    assert caught.value.code == "E_FEATURES"


def test_a_family_that_swallows_the_mask_is_refused() -> None:
    model = make_model(FAMILIES["llama"]())
    model._supports_attention_backend = False
    causal = CausalModel(model, device=CPU)
    causal._mask = causal._mask.clone()  # what the layers get is no more what the model was given
    with pytest.raises(EdgespecError, match="do not take the mask"):
        causal.features_of_texts([torch.ones(9, dtype=torch.long)] * 2)


def test_blocks_are_pieces_of_texts_and_no_more_than_asked_for() -> None:
    texts = [list(range(20)), list(range(100, 109))]
    blocks = cut_blocks(texts, block_tokens=8)
    assert [(block.text, block.ids) for block in blocks] == [
        (0, list(range(8))), (0, list(range(8, 16))), (1, list(range(100, 108))),
    ]  # fmt: skip
    assert sum(len(block.ids) for block in cut_blocks(texts, block_tokens=8, max_tokens=17)) == 16
    with pytest.raises(EdgespecError, match="8 tokens"):
        cut_blocks([[1, 2, 3]], block_tokens=8)


def test_room_for_a_group_comes_off_the_targets() -> None:
    config = FAMILIES["llama"]()
    group = place_groups(config, place_with(MemoryLimits(max_cpu_bytes=1 << 30), block_tokens=64))
    taken = texts_bytes(config, num_rows=group.rows, text_rows=64, dtype=torch.float32)
    assert group.memory == Memory(device_budget_bytes=(1 << 30) - taken, host_budget_bytes=(1 << 30) - taken)
    assert 0.9 * (1 << 28) < taken <= 1 << 28
    least = place_groups(config, place_with(MemoryLimits(max_cpu_bytes=1), block_tokens=64))
    assert (least.rows, least.memory.device_budget_bytes) == (64, 0)
