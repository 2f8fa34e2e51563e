"""Keys and values of layers that stream wait in RAM where a pass then moves fewer bytes, or where nothing else fits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec.cli.estimate.command import _lines
from edgespec.config import MemoryLimits
from edgespec.errors import EdgespecError
from edgespec.model.mechanisms.waiting_keys import NUM_PLACES
from edgespec.model.pass_rows import MOST_PROMPT_ROWS
from edgespec.pair.folder import open_architecture
from edgespec.placement.cache_memory import cache_bytes, row_sizes, waiting_windows
from edgespec.placement.parallel import PassShares
from edgespec.placement.pass_load import model_load, moved_bytes
from edgespec.placement.place import Memory, PairWeights, PlacedWeights, place_weights
from edgespec.placement.run_config import RunConfig
from edgespec.placement.weights import weights_by_size
from edgespec.tree.settings import TreeSettings
from offload.placement import KEYS, KEYS_ON_THE_WAY, PINNED, STAGING, WAITING_KEYS, Placement
from profiles.roofline import stream_s
from tests.support.families import FAMILIES
from tests.support.published_configs import MODELS

GIB = 1 << 30
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
LONG, TREE = 32_768, TreeSettings(size=64)
ROW_BYTES = 2 * 2 * 8 * 128  # of a layer of the 70B, in 16 bits


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> PairWeights:
    """A 70B in four bits, by its configuration alone."""
    folder = tmp_path_factory.mktemp("70b")
    (folder / "config.json").write_text(json.dumps({**MODELS["llama3-70b"], "max_position_embeddings": 131_072}))
    return PairWeights(target=weights_by_size(open_architecture(folder), dtype=torch.bfloat16, quant="nf4"), draft=None)


def placed(
    weights: PairWeights, *, gpu_gib: float = 24, ram_gib: float = 64, device: torch.device = CUDA, **run: Any
) -> PlacedWeights:
    config: dict[str, Any] = {
        "device": device, "dtype": torch.bfloat16, "quant": "nf4", "limits": MemoryLimits(),
        "context_tokens": LONG, "prompt_tokens": run.get("context_tokens", LONG), **run,
    }  # fmt: skip
    memory = Memory(device_budget_bytes=int(gpu_gib * GIB), host_budget_bytes=int(ram_gib * GIB))
    return place_weights(weights, TREE, RunConfig(**config), memory)


def keys_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.placement.place._keys_that_may_wait", lambda _request: None)


def in_ram(placement: Placement, what: str) -> int:
    return sum(num_bytes for use, num_bytes in placement.host_bytes.items() if use.endswith(what))


def test_a_long_context_leaves_the_card_to_layers(weights: PairWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = placed(weights).placement
    keys_stay(monkeypatch)
    staying = placed(weights).placement
    assert not staying.waiting_keys
    assert waiting.num_resident > staying.num_resident + 8
    assert waiting.waiting_keys == frozenset(range(80)) - waiting.resident_layers
    assert waiting.num_on_disk == 0
    num_waiting = len(waiting.waiting_keys)
    assert waiting.keys_bytes == num_waiting * ROW_BYTES * (LONG + 2 * 65) - num_waiting * ROW_BYTES * 65
    assert waiting.pass_bytes == waiting.streamed_bytes + waiting.keys_bytes
    # Texts are half as long on average: what moves then is less, if not at the end of the context
    assert waiting.streamed_bytes + waiting.keys_bytes / 2 < 0.97 * staying.streamed_bytes
    assert waiting.planned_bytes <= 24 * GIB


def test_the_bytes_that_wait_are_those_that_leave_the_card(
    weights: PairWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = placed(weights).placement
    keys_stay(monkeypatch)
    staying = placed(weights).placement
    kept, all_kept = waiting.device_bytes[KEYS], staying.device_bytes[KEYS]
    assert kept == pytest.approx(all_kept * waiting.num_resident / 80, rel=1e-6)
    assert in_ram(waiting, WAITING_KEYS) == pytest.approx(all_kept - kept, rel=0.02)
    assert waiting.device_bytes[KEYS_ON_THE_WAY] == pytest.approx(NUM_PLACES * ROW_BYTES * (LONG + 65), rel=0.02)
    assert in_ram(waiting, PINNED) == waiting.streamed_bytes
    assert STAGING not in waiting.host_bytes


def test_a_context_fits_that_does_not_otherwise(weights: PairWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """128k tokens take 40 GiB in all layers, and one in two places."""
    run: dict[str, Any] = {"gpu_gib": 12, "ram_gib": 96, "context_tokens": 131_072, "prompt_tokens": 8192}
    placement = placed(weights, **run).placement
    assert len(placement.waiting_keys) + placement.num_resident == 80
    assert placement.planned_bytes <= 12 * GIB
    keys_stay(monkeypatch)
    with pytest.raises(EdgespecError, match="more than the limit"):
        placed(weights, **run)


@pytest.mark.parametrize(
    "run",
    [
        {"context_tokens": 2048},  # too little to gain
        {"prompt_tokens": LONG - 1},  # as many bytes over the link as a pass saves
        {"gpu_gib": 80},  # all layers stay
        {"device": CPU, "gpu_gib": 24},  # whose memory is RAM
    ],
    ids=["short", "full", "all", "cpu"],
)
def test_they_stay_where_that_does_not_pay(run: dict[str, Any], weights: PairWeights) -> None:
    placement = placed(weights, **run).placement
    assert not placement.waiting_keys
    assert placement.keys_bytes == 0
    assert KEYS_ON_THE_WAY not in placement.device_bytes


def test_they_stay_where_the_system_locks_little(weights: PairWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies from other memory are slow."""
    monkeypatch.setattr("edgespec.placement.place.locks_little", lambda: True)
    assert not placed(weights).placement.waiting_keys


@pytest.mark.parametrize("ram_gib", [20, 30, 40])
def test_no_more_is_read_from_disk(ram_gib: int, weights: PairWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = placed(weights, ram_gib=ram_gib).placement
    assert sum(waiting.host_bytes.values()) <= ram_gib * GIB
    keys_stay(monkeypatch)
    assert waiting.disk_bytes <= placed(weights, ram_gib=ram_gib).placement.disk_bytes


@pytest.mark.parametrize("family", ["gemma4-shared", "llama"])
def test_keys_that_other_layers_read_stay(family: str, tmp_path: Path) -> None:
    """A card that is too small for all of them by a sixth refuses the one, and takes the other."""
    FAMILIES[family]().save_pretrained(tmp_path)
    target = weights_by_size(open_architecture(tmp_path), dtype=torch.float32, quant=None)
    run = {"dtype": torch.float32, "quant": None, "context_tokens": 1 << 20}
    pair = PairWeights(target=target, draft=None)
    full = placed(pair, **run).placement
    assert full.is_resident
    gpu_gib = (full.planned_bytes - full.device_bytes[KEYS] // 6) / GIB
    if family == "llama":
        assert placed(pair, gpu_gib=gpu_gib, **run).placement.waiting_keys
    else:
        with pytest.raises(EdgespecError, match="more than the limit"):
            placed(pair, gpu_gib=gpu_gib, **run)


def test_estimates_count_them_over_the_link(weights: PairWeights) -> None:
    """Those in use, and new ones back; attention reads all of them on the card."""
    found = placed(weights)
    full, half = (
        model_load(found.target, found.placement, keys=keys, num_texts=1, device=CUDA) for keys in (LONG, LONG // 2)
    )
    assert full.waiting_bytes == found.placement.keys_bytes
    assert full.waiting_bytes - half.waiting_bytes == len(found.placement.waiting_keys) * ROW_BYTES * LONG // 2
    assert full.cache_bytes == cache_bytes(found.target.skeleton.model.config, rows=LONG, dtype=torch.bfloat16)
    assert full.ram_bytes == found.placement.streamed_bytes
    rates: Any = type("Rates", (), {"link_bytes_per_s": 1e9, "disk_bytes_per_s": 1e9, "from_ram": lambda *_, **__: 1e9})
    assert stream_s(full, rates) == pytest.approx((full.ram_bytes + full.waiting_bytes) / 1e9)
    assert moved_bytes(found.target, found.placement) == found.placement.pass_bytes


def test_layers_with_windows_move_no_more_than_these(tmp_path: Path) -> None:
    """Of Gemma 3's layers, all but each second have windows of 12 rows here."""
    config = FAMILIES["gemma3"]()
    config.save_pretrained(tmp_path)
    pair = PairWeights(target=weights_by_size(open_architecture(tmp_path), dtype=torch.float32, quant=None), draft=None)
    run: dict[str, Any] = {"dtype": torch.float32, "quant": None, "context_tokens": 1 << 20, "num_texts": 2}
    full = placed(pair, **run).placement
    found = placed(pair, gpu_gib=(full.planned_bytes - full.device_bytes[KEYS] // 6) / GIB, **run).placement
    sizes = [sum(of) for of in row_sizes(config, torch.float32)]
    windows = waiting_windows(pair.target.skeleton.model)
    assert found.waiting_keys & windows.keys()
    for rows in (8, 4096):
        expected = sum(
            sizes[layer] * (found.new_rows + (min(rows, 2 * 12) if layer in windows else rows))
            for layer in found.waiting_keys
        )
        assert found.moved_keys_bytes(rows) == expected


def test_a_long_prompts_activations_are_those_of_a_part(weights: PairWeights) -> None:
    short, long = (
        placed(weights, context_tokens=LONG, prompt_tokens=tokens).placement for tokens in (MOST_PROMPT_ROWS, LONG - 1)
    )
    assert long.device_bytes["target: one pass"] == short.device_bytes["target: one pass"]


def test_a_plan_and_an_estimate_name_them(weights: PairWeights) -> None:
    found = placed(weights)
    num_waiting = len(found.placement.waiting_keys)
    settings = {"tree_size": 64, "texts": 1, "dtype": "bfloat16", "device": "a card", "context_tokens": LONG}
    lines = "\n".join(_lines(found, {**settings, "pass_bytes": moved_bytes(found.target, found.placement)}))
    assert f"{num_waiting} layers: keys and values" in lines
    assert "keys and values on their way" in lines
    assert f"on disk, keys and values of {num_waiting} in RAM; at most {found.placement.pass_bytes / GIB:.3f}" in lines


def test_texts_that_share_passes_are_weighed_with_what_their_keys_move(weights: PairWeights) -> None:
    placement = placed(weights).placement
    without = replace(placement, keys_row_bytes=0)
    shares = PassShares()
    more = shares.step(placement, 1) - shares.step(without, 1)
    assert more == pytest.approx((1 - placement.resident_share) * placement.keys_bytes / placement.streamed_bytes)
