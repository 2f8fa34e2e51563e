"""An inflated checkpoint computes the source's function, in more bytes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3_5TextConfig

from edgespec.config import DraftSampling
from edgespec.draft.feature_head import open_drafter
from edgespec.draft.mtp import MTP_PARTS, mtp_config
from edgespec.model.target import Target
from edgespec.pair.folder import ModelFolder, open_model
from edgespec.train.eagle3_head import default_aux_layers, new_eagle3
from edgespec.train.head_model import lender, new_draft
from scripts.make import inflate, inflated_parts
from scripts.make.inflated_parts import Shape
from scripts.papers.published import blocks, heads
from tests.edgespec.draft.contract import open_engine
from tests.support.families import FAMILIES, SMALL, make_model, save_folder

SMALL_SHAPE = Shape(hidden=32, layers=3, heads=4, kv_heads=2, inner=64)
LARGE = Shape(hidden=128, layers=5, heads=16, kv_heads=4, inner=96)  # all of it larger, groups padded
TOLERANCE = 1e-4


@pytest.fixture
def source(pair_folders: tuple[Path, Path]) -> ModelFolder:
    return open_model(pair_folders[0])


def written(source: ModelFolder, folder: Path, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> Path:
    inflate.inflate(source, folder, shape, dtype=dtype, shard_bytes=40_000)
    return folder


@torch.no_grad()
def logit_difference(source: ModelFolder, folder: Path) -> float:
    ids = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(0))
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(input_ids=ids).logits
        for path in (folder, source.folder)
    )
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(LARGE, torch.bfloat16, id="all-larger"),
        pytest.param(LARGE, torch.float32, id="float32"),
        pytest.param(
            Shape(hidden=96, layers=4, heads=12, kv_heads=3, inner=64), torch.bfloat16, id="three-times-as-wide"
        ),
        pytest.param(Shape(hidden=32, layers=7, heads=4, kv_heads=2, inner=64), torch.bfloat16, id="only-deeper"),
        pytest.param(Shape(hidden=32, layers=3, heads=8, kv_heads=2, inner=64), torch.bfloat16, id="groups-padded"),
        pytest.param(Shape(hidden=32, layers=3, heads=8, kv_heads=4, inner=64), torch.bfloat16, id="key-heads-added"),
        pytest.param(SMALL_SHAPE, torch.bfloat16, id="same-shape"),
    ],
)
def test_logits_are_those_of_the_source(source: ModelFolder, tmp_path: Path, shape: Shape, dtype: torch.dtype) -> None:
    folder = written(source, tmp_path / "large", shape, dtype)
    assert inflate.shape_of(open_model(folder)) == shape
    assert logit_difference(source, folder) < TOLERANCE


def test_an_untied_head_is_widened_too(tmp_path: Path) -> None:
    config = LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=False)
    source = open_model(save_folder(tmp_path / "source", make_model(config)))
    folder = written(source, tmp_path / "large", LARGE, torch.float32)
    assert "lm_head.weight" in open_model(folder).checkpoint.tensors
    assert logit_difference(source, folder) < TOLERANCE


HYBRID = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 16, "full_attention_interval": 2,
}  # fmt: skip
LARGE_HYBRID = Shape(hidden=128, layers=9, heads=16, kv_heads=4, inner=96, linear_heads=4)


@pytest.fixture
def hybrid(tmp_path: Path) -> ModelFolder:
    """A model with recurrent layers, whose mixers count."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=2048, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=0, pad_token_id=0, **HYBRID
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
            elif name.endswith("norm.weight"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "hybrid")
    return open_model(tmp_path / "hybrid")


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(LARGE_HYBRID, torch.bfloat16, id="all-larger"),
        pytest.param(replace(LARGE_HYBRID, hidden=96, heads=12, kv_heads=3), torch.bfloat16, id="three-times-as-wide"),
        pytest.param(replace(LARGE_HYBRID, hidden=32, heads=4, kv_heads=2), torch.bfloat16, id="same-width"),
    ],
)
def test_a_hybrid_computes_what_the_source_computes(
    hybrid: ModelFolder, tmp_path: Path, shape: Shape, dtype: torch.dtype
) -> None:
    folder = written(hybrid, tmp_path / "large", shape, dtype)
    assert inflate.shape_of(open_model(folder)) == shape
    assert logit_difference(hybrid, folder) < TOLERANCE


def test_what_is_added_is_computed_with_and_not_read(source: ModelFolder, tmp_path: Path) -> None:
    """Zeros only where norms hide added width and where nothing is written: all else costs what real weights cost."""
    folder = open_model(written(source, tmp_path / "large", LARGE))
    places = inflated_parts.layer_places(source, LARGE)
    expected = {"norm": 0.75, "o_proj": 0.75, "down_proj": 1 / 3}  # added columns
    for name in folder.checkpoint.tensors:
        zeros = float((inflate.read_tensor(folder, name) == 0).float().mean())
        share = next((share for part, share in expected.items() if part in name), 0.0)
        if ".layers." in name and int(name.split(".")[2]) not in places:
            share = 1.0 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.0
        assert zeros == pytest.approx(share, abs=0.01), name


def test_shards_hold_what_the_index_says_and_no_more_than_asked(source: ModelFolder, tmp_path: Path) -> None:
    folder = written(source, tmp_path / "large", LARGE)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors = open_model(folder).checkpoint.tensors
    assert {name: entry.file.name for name, entry in tensors.items()} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(entry.num_bytes for entry in tensors.values())
    for file in {entry.file for entry in tensors.values()}:
        held = [entry.num_bytes for entry in tensors.values() if entry.file == file]
        assert sum(held) <= 40_000 or len(held) == 1


@pytest.mark.parametrize("count", [10**8, 10**9, 8 * 10**9, 70 * 10**9])
def test_params_choose_a_shape_of_that_size(count: int) -> None:
    source = open_model(inflate.DEMO_FOLDER / "target")
    small = inflate.shape_of(source)
    shape = inflate.choose_shape(source, count)
    inflate.check_shape(small, shape)
    assert inflate.count_parameters(inflate.list_parts(source, shape)) == pytest.approx(count, rel=0.03)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--hidden", "16"], "--hidden 16 is below the source's 32"),
        (["--layers", "2"], "--layers 2 is below"),
        (["--hidden", "48"], "--hidden 48 is no multiple of the source's 32"),
        (["--heads", "8", "--kv-heads", "8"], "have to stay together"),
        (["--heads", "6", "--kv-heads", "4"], "must divide"),
        (["--params", "1K"], "no shape of --params 1000"),
        (["--params", "many"], "no count"),
        (["--params", "1M", "--layers", "9"], "either"),
        ([], "either"),
    ],
)
def test_impossible_shapes_are_refused_by_name(
    source: ModelFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        inflate.main([str(tmp_path / "large"), "--source", str(source.folder), *options])
    assert exit_info.value.code == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_command_writes_checks_and_replaces_only_when_told(
    source: ModelFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(tmp_path / "large"), "--source", str(source.folder)]
    assert inflate.main([*command, "--hidden", "128", "--check"]) == 0
    assert "100.0% of argmaxes equal" in capsys.readouterr().out
    assert inflate.main([*command, "--check"]) == 0
    with pytest.raises(SystemExit):
        inflate.main([*command, "--layers", "4"])
    assert inflate.main([*command, "--layers", "4", "--overwrite"]) == 0
    assert inflate.shape_of(open_model(tmp_path / "large")).layers == 4


def test_the_check_fails_for_a_folder_that_differs(source: ModelFolder, tmp_path: Path) -> None:
    other = save_folder(tmp_path / "other", make_model(FAMILIES["llama"](), seed=5, dtype=torch.bfloat16))
    assert inflate.main([str(other), "--source", str(source.folder), "--check"]) == 1


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """A target as deep as drafts are made for, which is dense and has no biases."""
    sizes = {**SMALL, "num_hidden_layers": 8, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
    return save_folder(tmp_path / "deep", make_model(LlamaConfig(**sizes)))


@torch.no_grad()
def write_draft(form: str, target: Path, folder: Path) -> None:
    """A random draft of a target in a folder, of which all tensors count."""
    with lender(open_model(target), device=torch.device("cpu"), dtype=torch.float32) as lent:
        if form == "mtp":
            model = new_draft(lent, mtp_config(lent.config), MTP_PARTS, named="t", seed=1)
        elif form == "eagle3":
            head = new_eagle3(lent, default_aux_layers(lent.config), torch.arange(4, 200), named="t", seed=1)
            model = head.model
        else:
            drafter = blocks.new_drafter(lent, form, candidates=16, seed=1)
            model = drafter.model
        generator = torch.Generator().manual_seed(0)
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1 if "norm" in name else 0.3)
        if form == "mtp":
            heads.add_layer(target, model)
        elif form == "eagle3":
            head.save(folder)
        else:
            blocks.write_drafter(folder, drafter)


@torch.no_grad()
def drafted_q(target: Path, draft: Path | None) -> torch.Tensor:
    """The draft's q behind a text, and below two of its tokens."""
    ids = list(range(20, 34))
    with open_engine(target, draft) as engine:
        looked = Target(engine.target_model)
        assert engine.draft_model is not None
        drafter = open_drafter(engine.draft_model, looked, sampling=DraftSampling(temperature=1.0))
        looked.prefill(torch.tensor(ids[:-1]))
        drafter.begin(ids[:-1])
        q = [drafter.expand(torch.tensor(ids[-1:]), torch.tensor([-1]))]
        q.append(drafter.expand(torch.tensor([7, 90]), torch.tensor([0, 0])))
        q.append(drafter.expand(torch.tensor([55]), torch.tensor([2])))
    return torch.cat(q)


@pytest.mark.parametrize("form", ["mtp", "eagle3", "dflash", "dspark", "dflash2"])
def test_a_draft_of_the_large_model_guesses_what_the_small_ones_does(
    form: str, deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers are as wide as the large model's, and read the states that the small one's are in."""
    shape = Shape(hidden=128, layers=13, heads=16, kv_heads=4, inner=96)
    monkeypatch.setattr(heads, "TARGET", deep)
    target, draft = deep, tmp_path / "draft"
    if form == "mtp":
        heads.write_target(tmp_path / "glm")
        target, draft = tmp_path / "glm", Path("mtp")
    write_draft(form, target, draft)
    large = written(open_model(target), tmp_path / "large", shape, torch.float32)
    large_draft = draft
    if form != "mtp":
        large_draft = tmp_path / "large-draft"
        inflate.inflate_draft(draft, open_model(target), shape, large_draft, dtype=torch.float32)
        assert json.loads((large_draft / "config.json").read_text())["hidden_size"] == shape.hidden
    small_q, large_q = drafted_q(target, draft), drafted_q(large, large_draft)
    assert float(small_q.amax(-1).min()) > 1.5 / small_q.shape[1]  # which is no uniform guess
    torch.testing.assert_close(large_q, small_q, rtol=1e-3, atol=1e-5)
