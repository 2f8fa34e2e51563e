"""A draft with other token ids is refused with the names of local ones that fit."""

import shutil
from pathlib import Path

import pytest
from transformers import LlamaConfig

from edgespec.cli.open_pair import open_named_pair
from edgespec.cli.options.model import ModelOptions
from edgespec.errors import EdgespecError
from edgespec.pair import at_hand
from edgespec.pair.folder import ModelFolder
from tests.cli.conftest import RunCli
from tests.edgespec.draft.dflash_drafter import Drafter, write_drafter
from tests.edgespec.draft.eagle3_head import Head, write_head
from tests.edgespec.draft.test_mtp_gguf import LAYER, cut
from tests.hub import Cache
from tests.offload.gguf.test_tiny_models import TINY
from tests.support.families import FAMILIES, SMALL, make_model, make_tokenizer, save_folder

PLAIN_FIX = "Use a draft of the same model family, or `policy=none` without a draft."


@pytest.fixture
def mismatched(cache: Cache, pair_folders: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """A target, and a draft with other token ids, in folders of their own; the cache is empty."""
    target = shutil.copytree(pair_folders[0], tmp_path / "targets" / "target")
    draft = save_folder(
        tmp_path / "drafts" / "draft", make_model(FAMILIES["llama"]()), tokenizer=make_tokenizer(swapped=True)
    )
    return target, draft


def refused(target: Path | None, draft: Path | None) -> EdgespecError:
    with pytest.raises(EdgespecError) as caught:
        open_named_pair(ModelOptions(target=target, draft=draft))
    return caught.value


def test_a_pair_that_fits_is_opened(pair_folders: tuple[Path, Path]) -> None:
    assert open_named_pair(ModelOptions(target=pair_folders[0], draft=pair_folders[1])).draft is not None
    assert open_named_pair(ModelOptions(target=None, draft=None)).draft is not None


@pytest.mark.parametrize("beside", [0, 1], ids=["target", "draft"])
def test_a_fitting_draft_beside_either_model_is_named(
    beside: int, mismatched: tuple[Path, Path], pair_folders: tuple[Path, Path]
) -> None:
    small = shutil.copytree(pair_folders[1], mismatched[beside].parent / "small")
    error = refused(*mismatched)
    assert error.code == "E_TOKENIZER_MISMATCH"
    assert "differ from the target's in 2 of 257" in error.what
    assert error.fix.startswith(f"Use a draft with the target's tokens: {small} (")
    assert error.fix.endswith(" times smaller); or --policy none without a draft.")


def test_a_model_of_the_cache_is_named_as_the_option_takes_it(
    mismatched: tuple[Path, Path], cache: Cache, pair_folders: tuple[Path, Path]
) -> None:
    cache.put("acme/Draft-1B", pair_folders[1])
    cache.put("acme/Old-1B", pair_folders[1], commit="c" * 40, ref=None)
    fix = refused(*mismatched).fix
    assert "acme/Draft-1B (" in fix
    assert f"acme/Old-1B --draft-revision {'c' * 40} (" in fix


def test_of_a_snapshot_other_revisions_are_not_named_by_their_folders(
    mismatched: tuple[Path, Path], cache: Cache, pair_folders: tuple[Path, Path]
) -> None:
    target = cache.put("acme/Target-70B", pair_folders[0])
    shutil.copytree(pair_folders[1], target.with_name("b" * 40))
    assert refused(target, mismatched[1]).fix == PLAIN_FIX


def test_at_most_three_are_named_each_once_and_in_one_line(
    mismatched: tuple[Path, Path], pair_folders: tuple[Path, Path]
) -> None:
    first = shutil.copytree(pair_folders[1], mismatched[0].parent / "a\nb")
    (mismatched[0].parent / "link").symlink_to(first)
    assert refused(*mismatched).fix.count("times smaller") == 1
    for number in range(4):
        shutil.copytree(pair_folders[1], mismatched[0].parent / f"z{number}")
    (mismatched[0].parent / "link").unlink()
    fix = refused(*mismatched).fix
    assert fix.count("times smaller") == 3
    assert "a\\nb (" in fix


def test_the_text_is_as_ever_where_none_fits(mismatched: tuple[Path, Path]) -> None:
    shutil.copytree(mismatched[0], mismatched[0].parent / "as-large")
    shutil.copytree(mismatched[1], mismatched[0].parent / "other-tokens")
    (mismatched[0].parent / "broken").mkdir()
    (mismatched[0].parent / "broken" / "config.json").write_text("{not json")
    assert refused(*mismatched).fix == PLAIN_FIX


def test_a_folder_that_cannot_be_looked_at_hides_no_other(
    mismatched: tuple[Path, Path], pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        shutil.copytree(pair_folders[1], mismatched[0].parent / name)
    opened = at_hand.open_draft

    def fail_for_one(folder: Path, target: ModelFolder) -> ModelFolder:
        if folder.name == "a":
            raise PermissionError(folder)
        return opened(folder, target)

    monkeypatch.setattr(at_hand, "open_draft", fail_for_one)
    assert f"{mismatched[0].parent / 'b'} (" in refused(*mismatched).fix


def test_siblings_that_may_not_be_read_are_passed_over(
    mismatched: tuple[Path, Path], pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path.exists raises for a file in somebody else's folder."""
    small = shutil.copytree(pair_folders[1], mismatched[0].parent / "small")
    exists = Path.exists

    def refuse(self: Path) -> bool:
        if self.parent.name == "lost+found":
            raise PermissionError(self)
        return exists(self)

    (mismatched[0].parent / "lost+found").mkdir()
    monkeypatch.setattr(Path, "exists", refuse)
    assert f"{small} (" in refused(*mismatched).fix


def test_those_beside_are_looked_at_first_and_only_for_so_long(
    mismatched: tuple[Path, Path], cache: Cache, pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put("acme/Draft-1B", pair_folders[1])
    small = shutil.copytree(pair_folders[1], mismatched[0].parent / "small")
    fix = refused(*mismatched).fix
    assert -1 < fix.find(str(small)) < fix.find("acme/Draft-1B")
    monkeypatch.setattr("edgespec.cli.open_pair.MAX_LOOKING_S", -1.0)
    assert refused(*mismatched).fix == PLAIN_FIX


def test_other_errors_pass_through(
    mismatched: tuple[Path, Path], pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(pair_folders[1], mismatched[0].parent / "small")
    monkeypatch.setattr(at_hand, "drafts_at_hand", lambda *_, **__: pytest.fail("models were looked at"))
    (mismatched[1] / "config.json").unlink()
    error = refused(*mismatched)
    assert (error.code, error.__cause__ is None) == ("E_CONFIG_MISSING", True)


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("generate", ["p.jsonl"]),
        ("chat", ["-p", "hello"]),
        ("bench", []),
        ("profile", []),
        ("train", ["acceptance", "--prompts", "p.jsonl", "-o", "out.json"]),
    ],
    ids=["generate", "chat", "bench", "profile", "train"],
)
def test_every_command_that_opens_a_pair_names_what_fits(
    command: str, arguments: list[str], mismatched: tuple[Path, Path], pair_folders: tuple[Path, Path], run_cli: RunCli
) -> None:
    small = shutil.copytree(pair_folders[1], mismatched[0].parent / "small")
    target, draft = map(str, mismatched)
    models = [target, "-md", draft] if command == "profile" else ["-m", target, "-md", draft]
    outcome = run_cli([*arguments, *models], files={"p.jsonl": '{"prompt": "def main("}\n'}, command=command).ended(2)
    assert f"Try: Use a draft with the target's tokens: {small} (" in outcome.err


def test_what_fits_is_named_where_no_draft_is_and_is_not_taken(
    cache: Cache, pair_folders: tuple[Path, Path], tmp_path: Path, run_cli: RunCli
) -> None:
    """One line: those that were made for the target first, then the smallest; quietly none is looked for."""
    deep = LlamaConfig(**{**SMALL, "num_hidden_layers": 8}, num_key_value_heads=2)
    target = save_folder(tmp_path / "models" / "Target", make_model(deep))
    small = shutil.copytree(pair_folders[1], tmp_path / "models" / "small")
    block = write_drafter(tmp_path / "models" / "z-block", Drafter())
    write_head(tmp_path / "models" / "other-head", Head(target_width=48))
    (tmp_path / "models" / "broken.gguf").write_bytes(b"GGUF")
    arguments = ["p.txt", "-n", "2", "-m", str(target)]
    outcome = run_cli(arguments, files={"p.txt": "def main("}).ended()
    said = [line for line in outcome.err.splitlines() if line.startswith("drafts here")]
    assert said == [
        f"drafts here that fit: {block} (a DFlash drafter, 0.1 MiB), {small} (a smaller model of the same tokens, "
        "0.0 MiB) (-md takes one, and -md auto the one that pays most)"
    ]
    assert "no draft (-md)" in outcome.err
    for named in (["-md", str(small)], ["-md", "none"], ["--policy", "none"], ["-q"]):
        assert "that fit" not in run_cli([*arguments, *named, "--overwrite"], files={"p.txt": "def main("}).err


def test_beside_a_layer_of_its_own_the_others_are_named(cache: Cache, tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "models").mkdir()
    target = shutil.copy(TINY / "qwen35-mtp.gguf", tmp_path / "models" / "Target.gguf")
    small = cut("glm4moe-mtp", tmp_path / "models" / "small.gguf", keep=lambda name: not name.startswith(LAYER),
                nextn_predict_layers=None, block_count=2)  # fmt: skip
    outcome = run_cli(["p.txt", "-n", "2", "-m", str(target)], files={"p.txt": "ab"}).ended()
    assert f"drafts here that fit: {small} (" in outcome.err
    assert "mtp (" not in outcome.err
