"""Names from Python mean what they mean on the command line, and nobody is asked over the network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec import EdgespecError, Engine, MemoryLimits, TreeSettings
from edgespec.cli import cli
from edgespec.cli.config.defaults import known_keys
from edgespec.cli.config.groups import all_commands
from edgespec.hub.names import BUILT_IN_HEAD, BUILT_IN_HEAD_FOLDER
from edgespec.hub.user_config import PAIR_SPELLINGS
from edgespec.pair.find import find_pair
from tests.edgespec.hub.test_gguf_models import put
from tests.hub import COMMIT, Cache

CONFIG = """
[defaults]
ctx_size = 123
[models.big]
model = "acme/Target-70B"
draft = "acme/Draft-1B"
draft-revision = "v2"
quant = "nf4"
[models.alone]
model = "{target}"
"""


@pytest.fixture
def cache(cache: Cache, pair_folders: tuple[Path, Path]) -> Cache:
    """A cache that holds a pair, its draft in two revisions; and a configuration with names for it."""
    cache.put("acme/Target-70B", pair_folders[0])
    cache.put("acme/Draft-1B", pair_folders[1])
    cache.put("acme/Draft-1B", pair_folders[1], commit="b" * 40, ref="v2")
    home = Path(os.environ["EDGESPEC_HOME"])
    home.mkdir()
    (home / "config.toml").write_text(CONFIG.format(target=pair_folders[0].as_posix()))
    return cache


def test_names_are_folders_then_aliases_then_the_cache(cache: Cache, pair_folders: tuple[Path, Path]) -> None:
    target, draft = find_pair("acme/Target-70B", "acme/Draft-1B")
    assert (target, draft) == (
        cache.folder / "models--acme--Target-70B/snapshots" / COMMIT,
        cache.folder / "models--acme--Draft-1B/snapshots" / COMMIT,
    )
    assert find_pair(*pair_folders) == pair_folders
    assert find_pair(str(pair_folders[0]), None) == (pair_folders[0], None)
    assert find_pair("alone", None) == (pair_folders[0], None)
    assert find_pair("alone", "acme/Draft-1B") == (pair_folders[0], draft)
    assert find_pair(None, None) == (None, None)
    assert find_pair(None, "acme/Draft-1B") == (None, draft)
    assert find_pair(None, BUILT_IN_HEAD) == (None, BUILT_IN_HEAD_FOLDER)


@pytest.mark.parametrize("word", ["self", "self:nf4", "self:int4"])
def test_words_for_the_targets_own_copy_are_no_folders(word: str, pair_folders: tuple[Path, Path]) -> None:
    assert find_pair(pair_folders[0], word) == (pair_folders[0], Path(word))
    with pytest.raises(EdgespecError, match="self:int3"):
        find_pair(pair_folders[0], "self:int3")


def test_an_alias_brings_its_draft_with_the_revision_unless_another_is_named(
    cache: Cache, pair_folders: tuple[Path, Path]
) -> None:
    _, draft = find_pair("big", None)
    assert draft.name == "b" * 40
    assert find_pair("big", pair_folders[1])[1] == pair_folders[1]
    _, draft = find_pair("big", "acme/Draft-1B")
    assert draft.name == COMMIT  # the alias's revision is of its own draft
    _, draft = find_pair("acme/Target-70B", "acme/Draft-1B", draft_revision="v2")
    assert draft.name == "b" * 40


def test_a_type_behind_an_alias_chooses_a_file_and_keeps_its_draft(cache: Cache, tmp_path: Path) -> None:
    folder = put(tmp_path / "several", "m.Q8_0.gguf", "m.F16.gguf")
    table = f'[models.small]\nmodel = "{folder.as_posix()}"\ndraft = "acme/Draft-1B"\ndraft-revision = "v2"\n'
    path = Path(os.environ["EDGESPEC_HOME"]) / "config.toml"
    path.write_text(path.read_text() + table)
    target, draft = find_pair("small:F16", None)
    assert target == folder / "m.F16.gguf"
    assert draft.name == "b" * 40


def test_of_two_configurations_the_one_that_was_asked_for_counts(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair_folders: tuple[Path, Path]
) -> None:
    other = tmp_path / "other.toml"
    other.write_text(f'[models.big]\nmodel = "{pair_folders[1].as_posix()}"\n')
    monkeypatch.setenv("EDGESPEC_CONFIG", str(other))
    assert find_pair("big", None) == (pair_folders[1], None)
    assert find_pair("alone", None) == (pair_folders[0], None)


def test_what_is_not_there_is_said_with_what_is(cache: Cache) -> None:
    with pytest.raises(EdgespecError, match="Closest here: acme/Target-70B") as caught:
        Engine.from_pretrained("acme/Target-7B")
    assert caught.value.code == "E_MODEL_NOT_FOUND"
    with pytest.raises(EdgespecError, match="not at revision 'v9'"):
        Engine.from_pretrained("acme/Target-70B", revision="v9")
    with pytest.raises(EdgespecError, match="of no draft"):
        Engine.from_pretrained("acme/Target-70B", draft_revision="v2")
    with pytest.raises(EdgespecError, match="of no target"):
        Engine.from_pretrained(revision="v2")


@pytest.mark.parametrize("text", ["[models", "models = 3", "[models]\nbig = 3", "[models.big]\ndraft = 'x'"])
def test_a_damaged_configuration_matters_to_names_alone(
    text: str, cache: Cache, pair_folders: tuple[Path, Path]
) -> None:
    (Path(os.environ["EDGESPEC_HOME"]) / "config.toml").write_text(text)
    with pytest.raises(EdgespecError) as caught:
        find_pair("big", None)
    assert caught.value.code == "E_USER_CONFIG"
    assert find_pair(*pair_folders) == pair_folders


def test_the_keys_of_a_pair_are_spelled_as_the_command_line_spells_them() -> None:
    known = known_keys(all_commands(cli.make_context("edgespec", ["doctor"], resilient_parsing=True)))
    pair = {spelling: key for spelling, key in known.spellings.items() if key in set(PAIR_SPELLINGS.values())}
    assert pair == PAIR_SPELLINGS


LIBRARY = """
import socket
def refuse(*arguments, **options):
    raise AssertionError(f"a socket was used: {arguments}")
socket.socket.connect = socket.socket.connect_ex = socket.create_connection = socket.getaddrinfo = refuse
from edgespec import EdgespecError, Engine, MemoryLimits, TreeSettings
with Engine.from_pretrained("big", self_check=False) as engine:
    print(engine.pair.draft.folder.name, engine.generate("x", max_new_tokens=2).finish_reason)
try:
    Engine.from_pretrained("Qwen/Qwen3-8B")
except EdgespecError as error:
    print(error.code)
"""


def test_a_program_that_names_models_uses_no_sockets(cache: Cache) -> None:
    """Nor does it have to set HF_HUB_OFFLINE for that."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    outcome = subprocess.run(
        [sys.executable, "-c", LIBRARY],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "HF_HUB_CACHE": str(cache.folder)},
    )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.split() == ["b" * 40, "length", "E_MODEL_NOT_FOUND"]


def test_a_plan_is_made_of_names_without_loading(cache: Cache, pair_folders: tuple[Path, Path]) -> None:
    """It is the plan that the engine would make; and a config.json is enough for it."""
    limits = MemoryLimits(max_resident_layers=1, max_cpu_bytes=1 << 30)  # what is free changes between the two plans
    settings = {"tree": TreeSettings(size=9), "limits": limits, "context_tokens": 99}
    plan = Engine.placement_for("big", **settings)
    with Engine.from_pretrained("big", **settings, self_check=False) as engine:
        assert plan.table() == engine.placement.table()
    assert plan.num_resident == 1
    config = cache.folder.parent / "config"
    config.mkdir()
    shutil.copy(pair_folders[0] / "config.json", config)
    assert Engine.placement_for(config, device="cuda", limits=MemoryLimits(max_gpu_bytes=1 << 30)).num_layers == 3
    assert Engine.placement_for().num_layers > 3  # the built-in pair
    with pytest.raises(EdgespecError, match="of RAM are needed"):
        Engine.placement_for("big", limits=MemoryLimits(max_cpu_bytes=1))
