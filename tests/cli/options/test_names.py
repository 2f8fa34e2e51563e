"""What -m, -md and TARGET may be: a folder, a name of the configuration, a name of the local cache."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from edgespec.cli import cli
from edgespec.errors import EdgespecError
from edgespec.hub.names import BUILT_IN_HEAD, BUILT_IN_HEAD_FOLDER, closest, resolve_model
from offload.file_names import INDEX_NAME
from tests.cli.conftest import Outcome, RunCli
from tests.edgespec.hub.test_gguf_models import put
from tests.hub import COMMIT, Cache, serve

ALIASES = """
[models.big]
model = "acme/Target-70B"
draft_model = "acme/Draft-1B"
ctx_size = 123
[models.folder]
model = "{folder}"
"""


@pytest.fixture
def cache(cache: Cache, pair_folders: tuple[Path, Path]) -> Cache:
    """A cache that holds a pair."""
    cache.put("acme/Target-70B", pair_folders[0])
    cache.put("acme/Draft-1B", pair_folders[1])
    return cache


def write_config(text: str) -> None:
    home = Path(os.environ["EDGESPEC_HOME"])
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(text)


def facts(outcome: Outcome) -> dict[str, object]:
    assert outcome.code == 0, outcome.err
    found: dict[str, object] = json.loads(outcome.out)
    return found


def test_a_folder_comes_before_an_alias_and_an_alias_before_the_cache(cache: Cache, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    aliases = {str(folder): "acme/Target-70B", "acme/Target-70B": "acme/Draft-1B", "here": str(folder)}
    assert resolve_model(str(folder), aliases=aliases) == folder
    assert resolve_model("acme/Target-70B", aliases=aliases).parent.parent.name == "models--acme--Draft-1B"
    assert resolve_model("acme/Draft-1B").name == COMMIT
    assert resolve_model("here", aliases=aliases) == folder


def test_the_closest_names_are_told_whatever_their_case_and_owner(cache: Cache) -> None:
    with pytest.raises(EdgespecError) as caught:
        resolve_model("target-7b", aliases={"big": "acme/Target-70B"})
    assert caught.value.code == "E_MODEL_NOT_FOUND"
    assert "Closest here: acme/Target-70B" in caught.value.what
    assert str(cache.folder) in caught.value.what
    assert caught.value.fix == "Give its owner too, as in Qwen/Qwen3-0.6B; edgespec models lists what is here."
    assert closest("gpt2", ["acme/Target-70B", "big"]) == []


@pytest.mark.parametrize("name", ["../nowhere", "a/b/c", "/no/such/folder", "~nobody-here/x", "with space", "x\0y"])
def test_what_can_be_no_name_is_a_folder_that_is_not_there(name: str, cache: Cache) -> None:
    with pytest.raises(EdgespecError, match="there is no folder"):
        resolve_model(name)


def test_the_built_in_head_needs_no_targets_name_and_drafts_for_no_other(
    pair_folders: tuple[Path, Path], run_cli: RunCli
) -> None:
    assert facts(run_cli(["-md", BUILT_IN_HEAD, "--json"], command="estimate"))["draft"] == str(BUILT_IN_HEAD_FOLDER)
    outcome = run_cli(["-m", str(pair_folders[0]), "-md", BUILT_IN_HEAD], command="estimate")
    assert outcome.code != 0
    assert "is a head of 'target'" in outcome.err


def test_a_revision_is_a_snapshot_of_its_own(cache: Cache, pair_folders: tuple[Path, Path]) -> None:
    other = cache.put("acme/Target-70B", pair_folders[1], commit="b" * 40, ref="v2")
    assert resolve_model("acme/Target-70B", revision="v2") == other
    assert resolve_model("acme/Target-70B", revision="b" * 40) == other
    assert resolve_model("acme/Target-70B").name == COMMIT
    with pytest.raises(EdgespecError, match=f"not at revision 'v3': {COMMIT}, {'b' * 40}, main, v2"):
        resolve_model("acme/Target-70B", revision="v3")
    with pytest.raises(EdgespecError, match="revision 'v2' does not apply to the folder"):
        resolve_model(str(pair_folders[0]), revision="v2")


def test_a_folder_of_the_cache_means_its_snapshot(cache: Cache) -> None:
    assert resolve_model(str(cache.folder / "models--acme--Draft-1B")) == resolve_model("acme/Draft-1B")
    with pytest.raises(EdgespecError, match="empty"):
        resolve_model("")


def test_the_shell_is_offered_names_and_files(cache: Cache) -> None:
    write_config(ALIASES.format(folder="unused"))
    words = {"_EDGESPEC_COMPLETE": "bash_complete", "COMP_CWORD": "3"}
    for incomplete, offered in [("acme/T", "plain,acme/Target-70B\nfile,acme/T\n"), ("bi", "plain,big\nfile,bi\n")]:
        environment = {**words, "COMP_WORDS": f"edgespec estimate -m {incomplete}"}
        assert CliRunner().invoke(cli, prog_name="edgespec", env=environment).output == offered


def test_names_reach_the_commands_as_folders(cache: Cache, run_cli: RunCli) -> None:
    names = ["acme/Target-70B", "-md", "acme/Draft-1B"]
    by_name = facts(run_cli([*names, "--json"], command="estimate"))
    pair = {role: by_name[role] for role in ("target", "draft")}
    assert str(by_name["target"]).startswith(str(cache.folder))
    assert str(by_name["draft"]).startswith(str(cache.folder))
    assert pair.items() <= facts(run_cli(["-m", *names, "--json"], command="estimate")).items()
    write_config(ALIASES.format(folder="unused"))
    by_alias = facts(run_cli(["big", "--json"], command="estimate"))
    assert by_alias["context_tokens"] == 123
    assert pair.items() <= by_alias.items()
    assert facts(run_cli(["big", "-c", "99", "--policy", "none", "--json"], command="estimate"))["context_tokens"] == 99


def test_an_alias_with_a_type_has_the_aliass_settings(run_cli: RunCli, tmp_path: Path) -> None:
    folder = put(tmp_path / "several", "m.Q8_0.gguf", "m.F16.gguf")
    write_config(f'[models.small]\nmodel = "{folder.as_posix()}"\nctx_size = 77\n')
    found = facts(run_cli(["small:F16", "--json"], command="estimate"))
    assert (found["target"], found["context_tokens"]) == (str(folder / "m.F16.gguf"), 77)


def test_a_folder_of_an_aliass_name_has_none_of_its_settings(
    cache: Cache, run_cli: RunCli, pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    write_config(ALIASES.format(folder="unused"))
    shutil.copytree(pair_folders[0], tmp_path / "cwd" / "big")
    found = facts(run_cli(["big", "--json"], command="estimate"))
    assert (found["target"], found["draft"], found["context_tokens"]) == ("big", None, 256)


def test_a_draft_belongs_to_the_model_that_it_was_named_with(
    cache: Cache, run_cli: RunCli, pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config('[defaults]\nmodel = "acme/Target-70B"\ndraft_model = "acme/Draft-1B"\n')
    assert str(facts(run_cli(["--json"], command="estimate"))["draft"]).startswith(str(cache.folder))
    assert facts(run_cli([str(pair_folders[0]), "--json"], command="estimate"))["draft"] is None
    assert facts(run_cli(["-m", str(pair_folders[0]), "--json"], command="estimate"))["draft"] is None
    monkeypatch.setenv("EDGESPEC_MODEL", str(pair_folders[0]))
    assert facts(run_cli(["--json"], command="estimate"))["draft"] is None
    monkeypatch.setenv("EDGESPEC_DRAFT_MODEL", str(pair_folders[1]))
    assert facts(run_cli(["--json"], command="estimate"))["draft"] == str(pair_folders[1])
    assert facts(run_cli(["acme/Target-70B", "--json"], command="estimate"))["draft"] is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--revision", "v2"], "--revision belongs to"),
        (["acme/Target-70B", "--draft-revision", "v2"], "--draft-revision belongs to"),
        (["acme/Target-70B", "-m", "acme/Draft-1B"], "once"),
    ],
)
def test_options_without_what_they_belong_to_are_refused(
    arguments: list[str], named: str, cache: Cache, run_cli: RunCli
) -> None:
    assert named in run_cli(arguments, command="estimate").ended(2).err


def test_what_is_to_be_downloaded_is_named_with_its_owner_or_not_at_all(
    cache: Cache, run_cli: RunCli, pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hf download target-7b` finds nothing on the Hub."""
    for name in ("target-7b", "ownerless"):
        if name == "ownerless":
            next(cache.put(name, pair_folders[0]).glob("model-00001-of-*")).unlink()
        refused = run_cli([name], command="estimate").ended(4)
        assert "hf download" not in refused.err
    assert "shards are missing" in refused.err
    assert "hf download acme/target-7b, or --online" in run_cli(["acme/target-7b"], command="estimate").err
    monkeypatch.setattr("edgespec.hub.cache.hub_cache", lambda: cache.folder / "nothing")
    assert "hf download Qwen/Qwen3-0.6B where" in run_cli([], command="models").err


def test_an_incomplete_snapshot_names_what_is_missing(cache: Cache, run_cli: RunCli) -> None:
    folder = resolve_model("acme/Target-70B")
    shards = sorted(set(json.loads((folder / INDEX_NAME).read_text())["weight_map"].values()))
    for shard in shards[:2]:
        (folder / shard).unlink()
    outcome = run_cli(["acme/Target-70B"], command="estimate").ended(4)
    assert f"2 of {len(shards)} shards are missing" in outcome.err
    assert f"{shards[0]}, {shards[1]}" in outcome.err
    assert "hf download acme/Target-70B" in outcome.err


@pytest.mark.skipif(sys.platform == "win32", reason="links take a privilege there")
def test_a_link_that_leads_nowhere_is_a_missing_shard(cache: Cache, run_cli: RunCli) -> None:
    folder = resolve_model("acme/Draft-1B")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../../blobs/gone")
    assert "1 of 1 shards are missing" in run_cli(["acme/Draft-1B"], command="estimate").ended(4).err


def test_other_weight_formats_have_explanations_of_their_own(
    cache: Cache, run_cli: RunCli, pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    gguf = tmp_path / "model.Q4_K_M.gguf"
    gguf.write_bytes(b"GGUF")
    outcome = run_cli(["-m", str(gguf)], command="estimate")
    assert (outcome.code, "is not a valid GGUF file: it is truncated" in outcome.err) == (2, True)
    folder = shutil.copytree(pair_folders[1], tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors"))
    prompts = {"p.txt": "def main("}
    (folder / "pytorch_model.bin").write_bytes(b"x")
    outcome = run_cli(["p.txt", "-m", str(folder)], files=prompts)
    assert (outcome.code, "pytorch_model.bin" in outcome.err, "save_pretrained" in outcome.err) == (4, True, True)
    (folder / "m.gguf").write_bytes(b"x")
    outcome = run_cli(["p.txt", "-m", str(folder)], files=prompts)
    assert (outcome.code, "m.gguf' is not a valid GGUF file" in outcome.err) == (2, True)


ONLINE = """
import huggingface_hub.constants as constants
from edgespec.errors import EdgespecError
from edgespec.hub.cache import find_cached
from edgespec.hub.names import resolve_model
seen = []
assert find_cached("owner/tiny") is None
print(resolve_model("owner/tiny", online=True, progress=lambda done, total: seen.append((done, total))))
assert seen[-1] == (30, 30), seen
assert constants.HF_HUB_OFFLINE
assert resolve_model("owner/tiny") == find_cached("owner/tiny")
try:
    resolve_model("owner/none", online=True)
except EdgespecError as error:
    assert (error.code, error.exit_code) == ("E_DOWNLOAD", 1)
    assert "RepositoryNotFound" in error.what, error.what
else:
    raise AssertionError
"""


def test_online_brings_weights_configuration_and_tokenizer_and_nothing_else(tmp_path: Path) -> None:
    wanted = ["config.json", "model.safetensors", "tokenizer.json"]
    unwanted = ["README.md", "pytorch_model.bin", "onnx/model.safetensors", "consolidated.safetensors"]
    with serve("owner/tiny", dict.fromkeys([*wanted, *unwanted], b"0123456789")) as address:
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
        outcome = subprocess.run(
            [sys.executable, "-c", ONLINE], capture_output=True, text=True, check=False, env=environment
        )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stderr == ""
    folder = Path(outcome.stdout.strip())
    assert sorted(path.name for path in folder.rglob("*")) == wanted
