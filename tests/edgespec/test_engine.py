"""The Python API on a tiny pair."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from edgespec import EdgespecError, Engine, MemoryLimits, SamplingSettings, TreeSettings
from edgespec.config import parse_size
from edgespec.placement.run_config import RunConfigOptions
from edgespec.text.context import new_token_limit
from offload.placement import NUM_STAGING_BUFFERS
from tests.offload.streaming import skeleton_of
from tests.support.pretend_cuda import PretendCudaDevice, pretend_cuda


@pytest.fixture
def engine(pair_folders: tuple[Path, Path]) -> Engine:
    return Engine.from_pretrained(pair_folders[0], draft=pair_folders[1])


def test_streaming_and_generating_give_the_same_text(engine: Engine) -> None:
    sampling = SamplingSettings(temperature=0.9)
    with engine:
        result = engine.generate("def main(", max_new_tokens=30, sampling=sampling, seed=5)
        chunks = list(engine.stream("def main(", max_new_tokens=30, sampling=sampling, seed=5))
    assert tuple(token for chunk in chunks for token in chunk.step.tokens) == result.token_ids
    streamed = "".join(chunk.text for chunk in chunks)
    assert result.text.startswith(streamed)  # bytes of an unfinished character are held back
    assert len(result.token_ids) == 30


def test_a_stream_can_be_left_and_the_next_text_is_not_disturbed(engine: Engine) -> None:
    with engine:
        expected = engine.generate("import os", max_new_tokens=12).token_ids
        stream = engine.stream("def main(", max_new_tokens=30)
        next(stream)
        next(stream)
        stream.close()
        assert engine.generate("import os", max_new_tokens=12).token_ids == expected


def test_a_text_depends_on_its_seed_and_its_name_alone(engine: Engine) -> None:
    def text(seed: int, name: str, tree: TreeSettings | None = None) -> tuple[int, ...]:
        engine.use_tree(tree or engine.tree)
        return engine.generate("x", max_new_tokens=12, temperature=1.0, seed=seed, name=name).token_ids

    with engine:
        first = text(2, "a")
        assert text(2, "b") != first
        assert text(3, "a") != first
        assert text(2, "a", TreeSettings(policy="opt-tree", size=5)) == first
        assert text(2, "a", TreeSettings(policy="none")) == first


def test_a_card_is_set_up_for_trees_while_a_pair_is_there(pair_folders: tuple[Path, Path]) -> None:
    options: RunConfigOptions = {"device": "cuda", "limits": MemoryLimits(max_gpu_bytes=parse_size("4GiB"))}
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with pretend_cuda(), patch("torch.cuda.set_per_process_memory_fraction") as limit:
        with Engine.from_pretrained(pair_folders[0], self_check=False, **options):
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            assert [call.args[0] < 0.5 for call in limit.call_args_list] == [True]  # of the card's 8 GiB
        assert limit.call_args.args[0] == 1
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_where_a_driver_spills_the_plan_is_the_allocators_limit(
    pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 GiB 5 are free, of which the plan leaves 1, and the context is no matter of the allocator."""
    monkeypatch.setattr("edgespec.machine.claim.spills_in_silence", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (5 << 30, 8 << 30))
    with pretend_cuda(), patch("torch.cuda.set_per_process_memory_fraction") as limit:
        Engine.from_pretrained(pair_folders[0], self_check=False, device="cuda").close()
    assert [call.args[0] for call in limit.call_args_list] == [0.5, 1.0]


@pytest.mark.parametrize("locked", [0, 1, 2])
def test_the_placement_says_what_is_so_where_little_memory_can_be_locked(
    locked: int, pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile of such a pair is known by the plan, because the next run has the same."""
    layer_bytes = skeleton_of(pair_folders[0], torch.bfloat16).records[0].flat_bytes
    monkeypatch.setattr(PretendCudaDevice, "max_locked_bytes", (NUM_STAGING_BUFFERS + locked) * layer_bytes)
    limits = MemoryLimits(max_gpu_bytes=parse_size("4GiB"), max_cpu_bytes=parse_size("2GiB"), max_resident_layers=1)
    options: RunConfigOptions = {"device": "cuda", "limits": limits}
    with pretend_cuda(), Engine.from_pretrained(pair_folders[0], self_check=False, **options) as engine:
        assert (engine.planned.num_pinned, engine.planned.num_on_disk) == (2, 0)
        assert (engine.placement.num_pinned, engine.placement.num_on_disk) == (locked, 2 - locked)
        assert (f"{locked} layers, copied in each pass" in engine.placement.table()) == (locked > 0)
        assert len(engine.generate("import os", max_new_tokens=2).token_ids) == 2


def test_a_memory_limit_makes_layers_stream_and_changes_no_token(pair_folders: tuple[Path, Path]) -> None:
    target, draft = pair_folders
    tree = TreeSettings()
    with Engine.from_pretrained(target, draft=draft, tree=tree, context_tokens=64) as free:
        expected = free.generate("def main(", max_new_tokens=20).token_ids
        assert free.placement.num_resident == free.placement.num_layers
        fixed = free.placement.planned_bytes - sum(
            n for what, n in free.placement.device_bytes.items() if "resident" in what
        )
    # Three layers of 37,376 bytes do not fit; two stream buffers and one layer as stored do.
    limits = MemoryLimits(max_cpu_bytes=fixed + 100_000)
    with Engine.from_pretrained(target, draft=draft, tree=tree, context_tokens=64, limits=limits) as tight:
        assert tight.placement.num_resident < tight.placement.num_layers
        assert tight.placement.planned_bytes <= limits.max_cpu_bytes
        assert tight.generate("def main(", max_new_tokens=20).token_ids == expected


def test_an_empty_prompt_is_refused(engine: Engine) -> None:
    with engine, pytest.raises(EdgespecError, match="no tokens"):
        engine.generate("")


def test_new_tokens_are_limited_by_the_context() -> None:
    assert new_token_limit(100, 40, 20) == (20, "length")
    assert new_token_limit(100, 40, 200) == (60, "context")
    assert new_token_limit(100, 40, -1) == (60, "context")
    assert new_token_limit(None, 40, 200) == (200, "length")
    for context, prompt, wanted in ((100, 100, 5), (None, 5, -1), (100, 5, 0), (100, 5, -2)):
        with pytest.raises(EdgespecError):
            new_token_limit(context, prompt, wanted)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10GiB", 10 << 30),
        ("10GB", 10_000_000_000),
        ("10G", 10 << 30),
        ("1.5 MiB", 3 << 19),
        ("512kib", 512 << 10),
        ("4096", 4096),
        ("7B", 7),
    ],
)
def test_sizes_are_parsed_as_written(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_closed_engine_lets_its_weights_go_at_once(pair_folders: tuple[Path, Path]) -> None:
    """Without waiting for the garbage collector: the next engine may need the room."""
    gc.disable()
    try:
        engine = Engine.from_pretrained(pair_folders[0], limits=MemoryLimits(max_resident_layers=1))
        engine.generate("ab", max_new_tokens=3)
        model = engine.target_model.model
        alive = [weakref.ref(part) for part in (model, *model.model.layers, model.model.layers[0].mlp.up_proj.weight)]
        del model
        engine.close()
        assert [part() for part in alive] == [None] * len(alive)
        with pytest.raises(EdgespecError, match="closed"):
            engine.generate("ab")
    finally:
        gc.enable()


def test_a_process_that_forgets_to_close_ends_quietly(pair_folders: tuple[Path, Path]) -> None:
    code = (
        "from edgespec import Engine, MemoryLimits\n"
        f"engine = Engine.from_pretrained({str(pair_folders[0])!r}, limits=MemoryLimits(max_resident_layers=0))\n"
        "next(engine.stream('ab', max_new_tokens=3))\n"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (outcome.returncode, outcome.stderr) == (0, "")


@pytest.mark.parametrize(
    ("tree", "num_started"),
    [(TreeSettings(policy="specinfer", branching=(3, 2, 1)), 0), (TreeSettings(policy="mcsd", target_width=2), 1)],
)
def test_a_chunk_says_which_tokens_the_draft_proposed(tree: TreeSettings, num_started: int) -> None:
    """The target ends a step of a tree, and starts one of a target-initialised tree."""
    with Engine.from_pretrained(tree=tree, profile="none", context_tokens=128, self_check=False) as engine:
        chunks = list(engine.stream("def read(path):", max_new_tokens=40, temperature=0.6, seed=2))
    steps = [chunk for chunk in chunks if not chunk.step.is_prefill][:-1]  # the last may end with the text
    for chunk in steps:
        drafted = len(chunk.token_ids) - 1
        expected = (False,) * num_started + (True,) * drafted + (False,) * (1 - num_started)
        assert chunk.from_draft == expected
    assert any(any(chunk.from_draft) for chunk in steps)
