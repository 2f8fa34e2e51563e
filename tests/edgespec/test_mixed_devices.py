"""A pair on a device: no operation of a step mixes tensors of the device and of the host.

The device is pretended (`tests/support/pretend_cuda.py`), and computes as the host does: texts must be the same.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import FalconConfig, LlamaConfig, Qwen3MoeConfig

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.config import parse_size
from edgespec.model.self_check import check_tree_reading
from edgespec.pair.folder import fingerprint, open_model
from edgespec.placement import place as placing
from edgespec.text.request import TextRequest
from edgespec.train.head_model import lender, new_head, save_head
from edgespec.tree.policies import POLICIES
from edgespec.tuning.draft_worth import DraftWorth
from offload.experts.cuda_experts import CudaExperts
from offload.experts.expert_placement import place_on_demand
from offload.formats.bitsandbytes_4bit import Bitsandbytes4Bit
from offload.formats.published import PublishedWeight
from offload.layouts.int4 import Int4
from offload.layouts.int4_orders import kernel_order
from offload.layouts.int4_tiles import TileOrder
from offload.placement import Placement
from offload.unpacked_once import LABEL
from profiles.in_place import HostRates
from tests.edgespec.draft.contract import facts
from tests.offload.formats import definitions
from tests.offload.formats.definitions import PUBLISHED
from tests.offload.formats.published_checkpoints import publish
from tests.support.families import EXPERTS, FAMILIES, RECURRENT, SMALL, make_model, save_folder
from tests.support.pretend_cuda import CUDA, HOST, MixedDevicesError, pretend_cuda, waited_for

PROMPT = list(range(60, 90))
SHAPES: dict[str, dict[str, Any]] = {
    "specinfer": {"branching": (3, 2, 1)},
    "mcsd": {"branching": (3, 2, 1)},
    "chain": {"draft_tokens": 4},
    "none": {},
}
TREES = [
    TreeSettings(policy=policy.name, draw=draw, **SHAPES.get(policy.name, {"size": 9}))
    for policy in POLICIES.values()
    for draw in policy.draws
    if policy.name != "static"  # a shape like sequoia's, from a file
]
ROOM = TreeSettings(policy="dyspec", size=64)  # sampled trees keep the draft's distributions, too
# One for each way in which layers read texts: whole, windows, chunks, soft caps, latents, text by text, and each state
READERS = {
    **{
        family: FAMILIES[family]
        for family in ("mistral-window", "gemma2", "gemma4-shared", "llama4", "gpt2", "mixtral")
    },
    **{family: RECURRENT[family] for family in ("lfm2", "qwen3-next", "mamba2", "jamba")},
    "falcon": lambda: FalconConfig(**SMALL, alibi=False),
}


@pytest.fixture(scope="module", autouse=True)
def _device() -> Iterator[None]:
    """Drafts grow in every step: beside looked up text, the clock would leave some out, and their faults with them."""
    with pretend_cuda(), patch.object(DraftWorth, "is_known", False):
        yield


REFUSED: dict[str, Callable[[Tensor, Tensor], object]] = {  # of three numbers each, on the device and on the host
    "operands": lambda there, here: there + here,
    "a condition": lambda there, here: torch.where(here > 0, there, 0.0),
    "parts": lambda there, here: torch.cat([there, here]),
    "a product": lambda there, here: torch.outer(there, here),
    "a mask": lambda there, here: there.masked_fill(here > 0, 0.0),
    "chosen rows": lambda there, here: there.index_select(0, here.long()),
    "indices": lambda there, here: there[here.long() - 1],
    "a table on the host": lambda there, here: here[there.long() - 1],
    "what is set at indices": lambda there, here: there.index_put_((there.long() - 1,), here),
    "a number of the host that changes": lambda there, here: here[0].add_(there[0]),
    "an array": lambda there, here: there.numpy(),
    "a generator of the host": lambda there, here: torch.rand(3, device=CUDA, generator=torch.Generator()),
    "a generator of the device": lambda there, here: torch.rand(3, generator=torch.Generator(CUDA)),
    "attention": lambda there, here: scaled_dot_product_attention(there[None], there[None], here[None]),
}
TAKEN: dict[str, Callable[[Tensor, Tensor], object]] = {
    "numbers without dimensions": lambda there, here: there * here[0] + torch.where(there > 1, there, here[1]),
    "a number that fills": lambda there, here: there.masked_fill(there > 1, here[0]),
    "copies": lambda there, here: (here.clone().copy_(there), there.copy_(here), there.to("cpu") + here),
    "a slice that is set": lambda there, here: there.__setitem__(slice(1, 3), here[1:]),
    "numbers that are read": lambda there, here: [here[int(number) - 1] for number in there],
    "memory of its own": lambda there, here: here.to(CUDA).zero_(),
}


@pytest.mark.parametrize(("operations", "are_refused"), [(REFUSED, True), (TAKEN, False)], ids=["refused", "taken"])
def test_the_pretended_device_refuses_what_cuda_does(
    operations: dict[str, Callable[[Tensor, Tensor], object]], are_refused: bool
) -> None:
    for what, operate in operations.items():
        here = torch.tensor([1.0, 2.0, 3.0])
        try:
            operate(here.to(CUDA), here)
        except MixedDevicesError:
            assert are_refused, what
        else:
            assert not are_refused, what
        assert here.tolist() == [1.0, 2.0, 3.0]


def open_engine(device: str, target: Path, draft: Path | None, **options: Any) -> Engine:
    """On the device one layer stays, and the others wait in locked memory."""
    limits = MemoryLimits(max_gpu_bytes=parse_size("4GiB"), max_cpu_bytes=parse_size("2GiB"), max_resident_layers=1)
    options = {"context_tokens": 128, "dtype": "float32", "self_check": False, "profile": "none", **options}
    return Engine.from_pretrained(target, draft=draft, device=device, limits=limits, **options)


Engines = tuple[Engine, Engine]  # on the device, and on the host


@pytest.fixture(scope="module")
def engines(pair_folders: tuple[Path, Path]) -> Iterator[Engines]:
    with (
        open_engine("cuda", *pair_folders, parallel=4, tree=ROOM) as on_device,
        open_engine("cpu", *pair_folders, parallel=4, tree=ROOM) as on_host,
    ):
        yield on_device, on_host


def texts(engine: Engine, ways: list[dict[str, Any]]) -> list[Any]:
    """The tokens of texts in these ways, in company."""
    requests: list[TextRequest] = [
        engine.request(PROMPT[number:], **{"max_new_tokens": 6, "seed": 3, "temperature": 0.8, **way})
        for number, way in enumerate(ways)
    ]
    found = [result for _, result in sorted(engine.generate_many(requests), key=lambda each: each[0])]
    for result in found:
        if isinstance(result, Exception):
            raise result
    return [(result.token_ids, result.finish_reason) for result in found if not isinstance(result, Exception)]


GREEDY_AND_WARM: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_p": 0.9}]
SHORT = [{**way, "max_new_tokens": 3} for way in GREEDY_AND_WARM]  # two trees each


def copies_waited_for(engine: Engine, ways: list[dict[str, Any]]) -> list[str]:
    """Where in the code the host waits for a copy to the device, while such texts are written once more."""
    waited_for.clear()
    texts(engine, ways)
    return waited_for


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree.policy}-{tree.draw}")
def test_trees_of_every_policy_and_draw_stay_on_the_device(tree: TreeSettings, engines: Engines) -> None:
    found = []
    for engine in engines:
        engine.use_tree(tree)
        found.append(texts(engine, SHORT))
    assert found[0] == found[1]
    assert not copies_waited_for(engines[0], SHORT)


def test_penalties_grammars_and_what_is_told_of_tokens_stay_on_the_device(engines: Engines) -> None:
    pytest.importorskip("llguidance")
    ways: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3, "logprobs": 2},
        {"presence_penalty": 1.2, "frequency_penalty": 0.6, "min_p": 0.01},
        {"logit_bias": {40: 4.0, 41: -100.0}, "ignore_eos": True, "top_k": 20},
        {"grammar": 'root ::= ("yes" | "no") (", " ("yes" | "no"))*\n', "temperature": 0.0},
    ]
    found = []
    for engine in engines:
        engine.use_tree(TreeSettings(size=9))
        found.append((texts(engine, ways[:1]), texts(engine, ways)))
    assert found[0] == found[1]
    assert not copies_waited_for(engines[0], ways)


def test_trees_that_tune_themselves_and_turns_stay_on_the_device(pair_folders: tuple[Path, Path]) -> None:
    found = []
    for device in ("cuda", "cpu"):
        with open_engine(device, *pair_folders, parallel=3) as engine:
            many = texts(engine, [{"max_new_tokens": count} for count in (4, 12, 8, 6)])
            turns = [
                engine.generate(PROMPT[:length], max_new_tokens=4, temperature=0.0, reuse=True).token_ids
                for length in (20, 30, 10)
            ]
            found.append((many, turns))
    assert found[0] == found[1]


@pytest.mark.parametrize("family", READERS)
def test_every_kind_of_layer_reads_trees_on_the_device(family: str) -> None:
    check_tree_reading(READERS[family](), device=CUDA)


@pytest.mark.parametrize("family", ["qwen3-next", "jamba"])
def test_texts_of_recurrent_targets_and_drafts_stay_on_the_device(family: str, tmp_path: Path) -> None:
    folder = save_folder(tmp_path, make_model(RECURRENT[family]()))
    found = []
    for device in ("cuda", "cpu"):
        with open_engine(device, folder, folder, parallel=2, tree=TreeSettings(size=4, depth=2)) as engine:
            found.append(texts(engine, SHORT))
            assert device == "cpu" or not copies_waited_for(engine, SHORT)
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose input embeddings are a table of their own."""
    config = LlamaConfig(**SMALL, num_key_value_heads=2)
    return save_folder(tmp_path_factory.mktemp("untied"), make_model(config, dtype=torch.bfloat16))


@pytest.mark.parametrize("router", [{}, {"router_groups": 8, "top_groups": 2}], ids=["whole", "routed"])
def test_feature_heads_stay_on_the_device(router: dict[str, int], untied: Path, tmp_path: Path) -> None:
    """They read the target's input embeddings in each pass, so that these stay there too."""
    target = open_model(untied)
    of = facts(target="target", target_fingerprint=fingerprint(target), **router)
    with lender(target, device=HOST, dtype=torch.float32) as model:
        save_head(new_head(model, of, seed=1), of, tmp_path)
    found = []
    for device in ("cuda", "cpu"):
        with open_engine(device, untied, tmp_path, parallel=2, tree=TreeSettings(size=9)) as engine:
            assert not engine.placement.has_table_on_host
            found.append((texts(engine, GREEDY_AND_WARM[:1]), texts(engine, GREEDY_AND_WARM)))
            assert device == "cpu" or not copies_waited_for(engine, GREEDY_AND_WARM)
    assert found[0] == found[1]


def test_draft_passes_of_few_shapes_stay_on_the_device(pair_folders: tuple[Path, Path]) -> None:
    with open_engine("cuda", *pair_folders, tree=TreeSettings(size=9), cuda_graphs=True) as engine:
        found = texts(engine, GREEDY_AND_WARM[:1])
        assert not copies_waited_for(engine, GREEDY_AND_WARM[:1])
    with open_engine("cpu", *pair_folders, tree=TreeSettings(size=9)) as engine:
        assert texts(engine, GREEDY_AND_WARM[:1]) == found


def test_few_rows_of_packed_weights_stay_on_the_device(tmp_path: Path) -> None:
    """In one row's passes nothing is unpacked: these weights are multiplied as they are, by both models."""
    folder = save_folder(tmp_path / "model", make_model(LlamaConfig(**{**SMALL, "hidden_size": 64, "head_dim": 16})))
    unpack, unpacked = Bitsandbytes4Bit.unpack, Counter[str]()

    def counted(self: Bitsandbytes4Bit, parts: Any, out: Tensor) -> Tensor:
        unpacked.update([out.device.type])
        return unpack(self, parts, out)

    tree = TreeSettings(policy="chain", draft_tokens=2)
    options = {"quant": "nf4", "draft_quant": "nf4", "cuda_graphs": False}  # which pad rows
    with patch.object(Bitsandbytes4Bit, "unpack", counted):
        with open_engine("cuda", folder, folder, tree=tree, **options) as engine:
            texts(engine, GREEDY_AND_WARM[:1])
            unpacked.clear()
            found = engine.generate(PROMPT[:3], max_new_tokens=6, seed=1).token_ids
            assert not unpacked
        with open_engine(
            "cuda", folder, None, tree=TreeSettings(policy="none"), **options | {"draft_quant": None}
        ) as engine:
            assert engine.generate(PROMPT[:3], max_new_tokens=6, seed=1).token_ids == found


def test_a_published_model_that_fits_is_multiplied_as_it_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers lie in the order of the card's kernel: no pass unpacks them, and texts are the same."""
    monkeypatch.setattr(definitions, "GROUP", 32)
    wide = {**SMALL, "hidden_size": 128, "head_dim": 32, "intermediate_size": 128, "num_hidden_layers": 2}
    folder = save_folder(tmp_path / "model", make_model(LlamaConfig(**wide), dtype=torch.bfloat16))
    publish(folder, PUBLISHED["compressed-int4"])
    product, unpack, calls = TileOrder.product, PublishedWeight.unpack, Counter[str]()

    def multiplied(order: TileOrder, rows: Tensor, *parts: Any, **named: Any) -> Tensor:
        calls["multiplied"] += 1
        return product(order, rows, *parts, **named)

    def unpacked(packing: PublishedWeight, parts: Any, out: Tensor) -> Tensor:
        calls["unpacked"] += 1
        return unpack(packing, parts, out)

    monkeypatch.setattr(TileOrder, "product", multiplied)
    monkeypatch.setattr(PublishedWeight, "unpack", unpacked)
    monkeypatch.setattr("offload.layouts.int4.rows_that_are_few", lambda *_: 16)
    found = []
    for quant in (None, "none"):
        calls.clear()
        limits = MemoryLimits(max_gpu_bytes=parse_size("4GiB"), max_cpu_bytes=parse_size("2GiB"))
        options: dict[str, Any] = {"context_tokens": 128, "dtype": "bfloat16", "self_check": False, "profile": "none"}
        options |= {"quant": quant, "draft_quant": quant}
        tree = TreeSettings(policy="chain", draft_tokens=2)
        with Engine.from_pretrained(folder, draft=folder, device="cuda", limits=limits, tree=tree, **options) as engine:
            found.append(texts(engine, GREEDY_AND_WARM[:1]))
            planned = engine.placement.device_bytes
        assert (calls["multiplied"] > 0, calls["unpacked"] == 0) == (quant is None, quant is None)
        assert (LABEL in planned) == (quant is None)
    assert found[0] == found[1]


MOVED, IN_PLACE = (HostRates(link_bytes_per_s=link, bytes_per_s=1e9, flops_per_s=1e9) for link in (1e15, 1.0))


@pytest.mark.parametrize(
    ("experts", "rates"),
    [("auto", MOVED), ("auto", IN_PLACE), ("cpu", MOVED), ("stream", MOVED)],
    ids=["moved", "in place", "cpu", "stream"],
)
def test_experts_and_their_rows_meet_on_one_device(
    experts: str, rates: HostRates, pair_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place(*arguments: Any, **memory: Any) -> Placement:
        found = place_on_demand(*arguments, **memory)
        return replace(found, experts=replace(found.experts, num_kept=2, num_pinned=found.experts.num_experts))

    monkeypatch.setattr(placing, "place_on_demand", place)
    monkeypatch.setattr(CudaExperts, "_measured", lambda _self, _groups: rates)
    folder = save_folder(tmp_path, make_model(FAMILIES["qwen3-moe"](), dtype=torch.bfloat16))
    found = []
    for device in ("cuda", "cpu"):
        tree = TreeSettings(size=9)
        with open_engine(device, folder, pair_folders[1], parallel=2, tree=tree, experts=experts) as engine:
            found.append(texts(engine, SHORT))
            if device == "cuda":
                assert bool(engine.expert_counts.in_place) == (rates is IN_PLACE)
    assert found[0] == found[1]


def test_nothing_touches_another_card(pair_folders: tuple[Path, Path]) -> None:
    """A context takes half a GiB there. What names no card goes to the current one."""
    with pretend_cuda(card=1), open_engine("cuda:1", *pair_folders) as on_second:
        assert str(on_second.device) == "cuda:1"
        found = on_second.generate(PROMPT, max_new_tokens=4).token_ids
    with open_engine("cpu", *pair_folders) as on_host:
        assert on_host.generate(PROMPT, max_new_tokens=4).token_ids == found


@pytest.mark.parametrize(("dtype", "computed"), [("auto", torch.float16), ("bfloat16", torch.bfloat16)])
def test_a_card_before_ampere_computes_in_float16_and_by_the_kernels_that_it_has(
    dtype: str, computed: torch.dtype, pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flash attention has none for it, nor has any kernel for bf16: long contexts would end with an error."""
    monkeypatch.setattr("edgespec.model.attention.MIN_SHARED", 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (8 << 30, 8 << 30))
    with pretend_cuda(capability=(7, 5)), open_engine("cuda", *pair_folders, dtype=dtype) as engine:
        assert engine.run_config.dtype == computed
        assert len(engine.generate(PROMPT, max_new_tokens=8).token_ids) == 8


def test_input_embeddings_of_a_target_that_streams_wait_in_ram(pair_folders: tuple[Path, Path], untied: Path) -> None:
    """What fits the card has no need; a pass waits for the ids alone."""
    found = []
    for device in ("cuda", "cpu"):
        with open_engine(device, untied, pair_folders[1], tree=ROOM) as engine:
            (weight,) = engine.target_model.model.get_input_embeddings().parameters()
            assert not weight.is_cuda
            assert engine.placement.has_table_on_host == (device == "cuda")
            on_host_bytes = engine.placement.host_bytes.get("target: input embeddings", 0)
            assert (on_host_bytes >= weight.nbytes) == (device == "cuda")
            found.append(engine.generate(PROMPT, max_new_tokens=8, temperature=0.8, seed=1).token_ids)
    assert found[0] == found[1]
    limits = MemoryLimits(max_gpu_bytes=parse_size("4GiB"))
    with Engine.from_pretrained(untied, device="cuda", limits=limits, self_check=False) as resident:
        assert resident.placement.is_resident
        assert not resident.placement.has_table_on_host


@pytest.mark.skipif(kernel_order() is None, reason="torch has no such kernel for this processor")
def test_a_cpu_multiplies_experts_beside_the_device_as_they_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense layers of the same file are unpacked on the device."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    config = {**EXPERTS, "hidden_size": 64, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 64}
    target = save_folder(tmp_path / "mixture", make_model(Qwen3MoeConfig(**config), dtype=torch.bfloat16))
    calls: Counter[str] = Counter()
    product = Int4.multiply_packed

    def counted(packing: Int4, parts: Any, rows: Tensor) -> Tensor:
        calls[rows.device.type] += 1
        return product(packing, parts, rows)

    monkeypatch.setattr(Int4, "multiply_packed", counted)
    options = {"dtype": "bfloat16", "quant": "int4", "tree": TreeSettings(policy="none"), "experts": "cpu"}
    with open_engine("cuda", target, None, **options) as engine:
        texts(engine, [{}])
    assert calls["cpu"] > 0
    assert calls["cuda"] == 0
