"""`edgespec models` lists adapters with their bases, or why they cannot be used; doctor counts those of the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.cli.conftest import RunCli
from tests.hub import Cache
from tests.offload.gguf.files import write_gguf
from tests.support.adapters import write_adapter
from tests.support.families import FAMILIES, make_model

GGUF_SETTINGS = {
    "general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 4.0,
    "general.base_model.0.name": "Base",
}  # fmt: skip


def test_adapters_are_listed_with_their_bases(
    cache: Cache, run_cli: RunCli, pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """They are no models, in the cache and in folders; one that is refused has its reason."""
    model = make_model(FAMILIES["llama"]())
    room = tmp_path / "adapters"
    cache.put("acme/Base", pair_folders[0])
    ends = ["q_proj", "v_proj"]
    cache.put("acme/Fine", write_adapter(tmp_path / "fine", model, ends, base_model_name_or_path="acme/Base"))
    write_adapter(room / "below" / "other", model, ends, base_model_name_or_path="acme/Absent")
    write_adapter(room / "broken", model, ends, use_qalora=True)
    numbers = torch.ones(2, 32).numpy().tobytes()
    sizes = {"a": (2, 32), "b": (32, 2)}
    matrices = [(f"blk.0.attn_v.weight.lora_{part}", size, 0, numbers) for part, size in sizes.items()]
    write_gguf(room / "below" / "style.gguf", GGUF_SETTINGS, matrices)
    outcome = run_cli([str(room), "--json"], command="models").ended()
    content: dict[str, Any] = json.loads(outcome.out)
    assert [found["name"] for found in content["models"]] == ["acme/Base"]
    found = {adapter["name"]: adapter for adapter in content["adapters"]}
    num_layers = model.config.num_hidden_layers
    fine, other, broken = found["acme/Fine"], found[str(room / "below" / "other")], found[str(room / "broken")]
    assert len(found) == 4
    style = found[str(room / "below" / "style.gguf")]
    assert (style["base"], style["modules"], style["problem"]) == ("Base", 1, None)
    assert (fine["base"], fine["modules"], fine["problem"]) == ("acme/Base", 2 * num_layers, None)
    assert other["base"] == "acme/Absent"
    assert broken["problem"]["code"] == "E_ADAPTER"
    assert "use_qalora" in broken["problem"]["message"]
    table = run_cli([str(room)], command="models").out
    assert "\nadapter acme/Fine: " in table
    assert f"    of acme/Base; {2 * num_layers} modules\n" in table
    assert "    of acme/Absent, which is not here by that name; " in table
    assert "    cannot be used: " in table
    checks = json.loads(run_cli(["--json"], command="doctor").out)["checks"]
    (hub,) = (check for check in checks if check["name"] == "Hugging Face cache")
    assert (hub["facts"]["models"], hub["facts"]["adapters"]) == (["acme/Base"], ["acme/Fine"])
    assert "1 model, 1 adapter (" in hub["text"]
