"""Experts that come on demand compute what experts in memory compute, however few have room and whatever fails."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from offload.errors import StreamError
from offload.experts import mixture
from offload.experts.cpu_experts import CpuExperts
from offload.experts.expert_group import ExpertGroup
from offload.experts.expert_source import HandedExpert
from offload.layer_store import LayerRecord, LayerStore
from offload.pages import MappedFile
from tests.offload.experts.mixtures import MIXTURES, on_demand, save_mixture
from tests.offload.streaming import logits, skeleton_of

ROWS = (20, 1, 7, 1)


# Room for all experts, for one and for some, in both formats: neighbours in one half each
HALVES = (
    ((None, torch.bfloat16, "5GB"), (1, torch.float32, "10KB"), (3, torch.bfloat16, "10KB")),
    ((None, torch.float32, "10KB"), (1, torch.bfloat16, "10KB"), (3, torch.float32, "10KB")),
)


@pytest.mark.parametrize(
    ("family", "room", "dtype", "shard"),
    [(family, *case) for index, family in enumerate(MIXTURES) for case in HALVES[index % 2]],
)
def test_logits_are_those_of_resident_experts_bit_for_bit(
    family: str, room: int | None, dtype: torch.dtype, shard: str, tmp_path: Path
) -> None:
    folder = save_mixture(tmp_path, family, shard=shard)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with on_demand(folder, room=room, dtype=dtype) as model:
        for rows in ROWS:
            assert torch.equal(logits(model.model, rows=rows), logits(reference, rows=rows))
        assert model.expert_counts.asked > model.expert_counts.hits


def test_only_experts_that_rows_ask_for_are_read_and_those_that_stay_are_not_read_again(folder: Path) -> None:
    group = skeleton_of(folder).expert_groups[0]
    with on_demand(folder) as model:
        logits(model.model, rows=1)
        first = model.expert_counts
        assert (first.asked, first.hits) == (3 * 2, 0)  # three layers, two experts a row
        assert first.read_bytes == 6 * group.expert_stored_bytes
        logits(model.model, rows=1)
        again = model.expert_counts - first
        assert (again.asked, again.hits, again.read_bytes) == (6, 6, 0)


def test_pages_of_other_experts_are_not_touched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int]] = []
    populate = MappedFile.populate

    def noted(self: MappedFile, start: int, end: int) -> None:
        read.append((start, end))
        populate(self, start, end)

    with on_demand(folder) as model:
        logits(model.model, rows=1)  # the ring reads dense parts of other layers too, whenever it likes
        monkeypatch.setattr(MappedFile, "populate", noted)
        logits(model.model, rows=1)
        experts = [record for group in skeleton_of(folder).expert_groups for record in group.experts]
        ranges = {(start, end) for record in experts for _, start, end in record.ranges}
        assert not ranges & set(read)


def test_an_expert_is_asked_for_once_however_many_rows_chose_it(folder: Path) -> None:
    with on_demand(folder, room=1) as model:
        logits(model.model, rows=100)
        assert model.expert_counts.asked == 3 * 4  # every layer's four experts


def test_numbers_beyond_the_last_expert_stand_for_none(folder: Path) -> None:
    """Routers mask a row's expert so, where a row has fewer."""
    with on_demand(folder) as model:
        module = model.model.model.layers[0].mlp.experts
        hidden, shares = torch.randn(3, 32), torch.rand(3, 2)
        found = module(hidden, torch.tensor([[0, 4], [4, 4], [4, 1]]), shares)
        alone = module(
            hidden, torch.tensor([[0, 1], [0, 1], [0, 1]]), shares * torch.tensor([[1, 0], [0, 0], [0, 1.0]])
        )
        torch.testing.assert_close(found, alone)
        assert not found[1].any()


@pytest.mark.parametrize("room", [None, 1])
def test_a_slow_disk_changes_nothing(room: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    read = CpuExperts._read

    def slow(self: CpuExperts, record: LayerRecord) -> None:
        time.sleep(0.02 if record.expert == 0 else 0)  # the first expert comes last
        read(self, record)

    monkeypatch.setattr(CpuExperts, "_read", slow)
    with on_demand(folder, room=room) as model:
        assert torch.equal(logits(model.model), logits(reference))


def test_reading_goes_on_while_experts_are_computed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first expert's reading waits until its layer's others are being read: it would wait for ever in turn."""
    begun = threading.Barrier(4)
    read = CpuExperts._read

    def together(self: CpuExperts, record: LayerRecord) -> None:
        begun.wait(timeout=30)
        read(self, record)

    monkeypatch.setattr(CpuExperts, "_read", together)
    with on_demand(folder) as model:
        logits(model.model, rows=100)


def lose_file(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(4096)


def write_over(path: Path) -> None:
    changed = {name: tensor * 2 for name, tensor in load_file(path).items()}
    save_file(changed, path.with_suffix(".new"), metadata={"format": "pt"})
    content = path.with_suffix(".new").read_bytes()
    with path.open("r+b") as file:
        file.write(content)


@pytest.mark.parametrize("room", [1, 100], ids=["read-again", "kept"])
@pytest.mark.parametrize(("damage", "code"), [(lose_file, "E_READ_FAILED"), (write_over, "E_FILE_CHANGED")])
def test_an_expert_that_cannot_be_read_is_one_error_and_its_return_mends_it(
    damage: Callable[[Path], None], code: str, room: int, tmp_path: Path
) -> None:
    shards = save_mixture(tmp_path, "qwen3-moe", shard="10KB")
    expert_file = skeleton_of(shards).expert_groups[1].experts[2].entries[0].file
    content = expert_file.read_bytes()
    with on_demand(shards, room=room) as model:
        before = logits(model.model)
        time.sleep(0.1)  # until the ring has read ahead
        damage(expert_file)
        with pytest.raises(StreamError, match=expert_file.name) as caught:
            logits(model.model)
        assert caught.value.code == code
        with expert_file.open("r+b") as file:
            file.write(content)
        assert torch.equal(logits(model.model), before)


def test_a_forward_that_raises_among_experts_leaves_them_usable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = mixture._expert_output

    def broken(module: Any, expert: HandedExpert, *rest: Any) -> Any:
        if expert.number == 2:
            raise ZeroDivisionError
        return output(module, expert, *rest)

    with on_demand(folder, room=2) as model:
        before = logits(model.model)
        monkeypatch.setattr(mixture, "_expert_output", broken)
        with pytest.raises(ZeroDivisionError):
            logits(model.model)
        monkeypatch.undo()
        assert not model._experts._cache._is_in_use.any()
        assert torch.equal(logits(model.model), before)


def test_closing_gives_the_modules_their_own_forward_back(folder: Path) -> None:
    with on_demand(folder) as model:
        experts = model.model.model.layers[0].mlp.experts
        assert "forward" in experts.__dict__
    assert "forward" not in experts.__dict__


@pytest.mark.parametrize("is_cacheable", [True, False])
def test_experts_that_leave_also_leave_the_systems_cache_where_it_cannot_hold_them(
    is_cacheable: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their pages would take the place of those of experts that stay, which are pages of files too."""
    left: set[bool] = set()
    drop = LayerStore.drop

    def spied(store: LayerStore, record: LayerRecord, *, from_cache: bool = False) -> None:
        if record.expert is not None:
            left.add(from_cache)
        drop(store, record, from_cache=from_cache)

    monkeypatch.setattr(LayerStore, "drop", spied)
    with on_demand(folder, room=2, is_cacheable=is_cacheable) as model:
        logits(model.model)
    assert left == {not is_cacheable}


def test_an_expert_that_rows_wait_for_is_not_evicted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of a file come back when they are touched; a device's slot would hold another expert's weights."""
    there: set[tuple[int, int | None]] = set()
    bring, acquire, drop = CpuExperts.bring, CpuExperts.acquire, CpuExperts.drop

    def noted_bring(self: CpuExperts, group: ExpertGroup, record: LayerRecord) -> Any:
        there.add((record.index, record.expert))
        return bring(self, group, record)

    def checked_hand_out(self: CpuExperts, group: ExpertGroup, record: LayerRecord) -> Any:
        assert (record.index, record.expert) in there
        return acquire(self, group, record)

    def noted_drop(self: CpuExperts, record: LayerRecord) -> None:
        there.remove((record.index, record.expert))
        drop(self, record)

    monkeypatch.setattr(CpuExperts, "bring", noted_bring)
    monkeypatch.setattr(CpuExperts, "acquire", checked_hand_out)
    monkeypatch.setattr(CpuExperts, "drop", noted_drop)
    with on_demand(folder, room=2) as model:
        for rows in ROWS:
            logits(model.model, rows=rows)
            assert len(there) <= 2
