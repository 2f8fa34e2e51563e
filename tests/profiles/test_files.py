"""Profiles as files: whole, strict, and used only where they were measured."""

import math
import tomllib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from profiles.errors import ProfileError
from profiles.files import Found, all_profiles, find_profile, profile_name, read_profile, write_profile
from profiles.schema import SCHEMA, MachineFacts, PairFacts, PassCurve, PassPoint, Profile
from tests.profiles.examples import MACHINE, PAIR, example_plan, example_profile

SECONDS = st.floats(0, 86_400, exclude_min=True)
NAMES = st.text(max_size=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def written(folder: Path) -> str:
    """The example's file."""
    write_profile(example_profile(), folder / "example.toml")
    return (folder / "example.toml").read_text(encoding="utf-8")


def refusal(path: Path, content: str | bytes) -> ProfileError:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ProfileError) as caught:
        read_profile(path)
    return caught.value


def changed(written: str, key: str, value: Any) -> str:
    """The file with the value at a dotted key replaced, or the key left out for None."""
    document = tomllib.loads(written)
    *way, last = [int(part) if part.isdecimal() else part for part in key.split(".")]
    place: Any = document
    for part in way:
        place = place[part]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return tomli_w.dumps(document)


@settings(max_examples=40)
@given(
    name=NAMES,
    seconds=st.lists(SECONDS, min_size=4, max_size=4),
    share=st.floats(0, 1),
    accelerator=st.none() | NAMES,
    versions=st.dictionaries(st.text(max_size=20), NAMES, max_size=3),
    rows=st.lists(st.floats(1, 1e6), min_size=4, max_size=4, unique=True),
)
def test_a_profile_survives_a_round_trip(
    folder: Path,
    name: str,
    seconds: list[float],
    share: float,
    accelerator: str | None,
    versions: dict[str, str],
    rows: list[float],
) -> None:
    profile = example_profile(
        example_plan(step_s=seconds[0], pays=False, threshold=share),
        machine=replace(MACHINE, processor=name, accelerator=accelerator, versions=versions),
        pair=replace(PAIR, target=name),
        passes=(
            PassCurve(
                num_texts=3,
                points=tuple(PassPoint(rows=at, seconds=s) for at, s in zip(sorted(rows), seconds, strict=True)),
            ),
        ),
    )
    write_profile(profile, folder / "trip.toml")
    assert read_profile(folder / "trip.toml") == profile


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("colour", "red", "unexpected"),
        ("machine.colour", "red", "unexpected"),
        ("plans.1.best.colour", "red", "unexpected"),
        ("pair.dtype", None, "required"),
        ("passes.0.points.2.rows", None, "required"),
        ("passes.0.points.2.seconds", -1.0, "greater than 0"),
        ("passes.0.points.0.seconds", 0.0, "greater than 0"),
        ("growth.layer_s", math.nan, "finite"),
        ("plans.0.best.plain_step_s", math.inf, "finite"),
        ("plans.0.best.by_size.0.nodes", math.nan, "finite"),
        ("plans.0.best.threshold", 1.5, "less than or equal to 1"),
        ("plans.0.best.size", 10**9, "less than or equal to 768"),
        ("plans.0.best.size", 0, "greater than or equal to 1"),
        ("plans.0.best.kept", [1.0], "at least 10"),
        ("plans.0.best.pays", "yes", "boolean"),
        ("passes.0.points.1.rows", 1e9, "less than or equal"),
        ("calibration_error", -0.1, "greater than or equal to 0"),
        ("machine.num_cores", "8", "integer"),
        ("machine.num_cores", True, "integer"),
        ("machine.system", 5, "string"),
        ("growth.tree_s", "0.1", "number"),
        ("passes", "fast", "tuple"),
        ("passes", [], "at least 1"),
        ("plans", [], "at least 1"),
        ("passes.0.points.2.rows", 1.0, "ascend"),
        ("name", "../../elsewhere", "pattern"),
        ("name", "", "pattern"),
    ],
)
def test_what_is_wrong_is_named_by_its_key(key: str, value: Any, problem: str, written: str, folder: Path) -> None:
    error = refusal(folder / "wrong.toml", changed(written, key, value))
    assert error.code == "E_PROFILE"
    named = key if problem != "ascend" else "passes.0.points"
    assert f"{named}: " in error.what
    assert problem in error.what


def test_many_problems_are_counted(written: str, folder: Path) -> None:
    for key in ("name", "growth", "machine.python", "pair.quant", "plans.0.best.step_s"):
        written = changed(written, key, None)
    assert refusal(folder / "wrong.toml", written).what.endswith("(and 2 more).")


@pytest.mark.parametrize("schema", ["edgespec.profile/4", "edgespec.profile/6", None, 7])
def test_another_schema_is_refused_for_what_it_is(schema: Any, written: str, folder: Path) -> None:
    error = refusal(folder / "wrong.toml", changed(written, "schema", schema))
    assert repr(schema) in error.what
    assert f"not '{SCHEMA}'" in error.what


@pytest.mark.parametrize(
    "content", ["name = ", "a = 1\na = 2", b"\xff\xfe", "a = " + "1" * 5000, "a = " + "[" * 5000, "\0"]
)
def test_what_is_no_toml_is_refused(content: str | bytes, folder: Path) -> None:
    assert "cannot be read as TOML" in refusal(folder / "wrong.toml", content).what


def test_a_missing_file_has_a_code_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no profile") as caught:
        read_profile(tmp_path / "none.toml")
    assert caught.value.code == "E_PROFILE_NOT_FOUND"


def test_a_folder_in_the_files_place_is_refused(tmp_path: Path) -> None:
    for act in (read_profile, lambda path: write_profile(example_profile(), path)):
        with pytest.raises(ProfileError) as caught:
            act(tmp_path)
        assert caught.value.code == "E_PROFILE"
    assert not list(tmp_path.parent.glob("*.partial"))


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ProfileError, match=r"p\.toml' cannot be written") as caught:
        write_profile(example_profile(), tmp_path / "file" / "p.toml")
    assert caught.value.code == "E_PROFILE"


def test_a_write_that_fails_half_way_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.toml"
    write_profile(example_profile(), path)
    right = Path.write_text

    def disk_full(self: Path, content: str, **options: Any) -> int:
        right(self, content[: len(content) // 2], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", disk_full)
    with pytest.raises(ProfileError, match="No space left"):
        write_profile(example_profile(context_tokens=1), path)
    assert read_profile(path) == example_profile()
    assert list(tmp_path.iterdir()) == [path]


@settings(max_examples=80)
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_noise_raises_nothing_but_a_profile_error(folder: Path, content: bytes) -> None:
    for prefix in (b"", f'schema = "{SCHEMA}"\n'.encode()):
        assert refusal(folder / "noise.toml", prefix + content).code == "E_PROFILE"


LONG = '"' + "x" * 400 + '"'
VALUES = ["", "-1", "0", "nan", "inf", "1e400", "true", '"x"', "[]", "{}", "1979-05-27", "9" * 30, LONG]


@settings(max_examples=80)
@given(st.data())
def test_a_file_with_a_changed_line_is_read_or_refused(folder: Path, written: str, data: st.DataObject) -> None:
    lines = written.splitlines()
    place = data.draw(st.integers(0, len(lines) - 1))
    change = data.draw(st.sampled_from([None, *VALUES]))
    key, equals, _ = lines[place].partition(" = ")
    lines[place : place + 1] = [] if change is None else [key + equals + change]
    path = folder / "mutated.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    with suppress(ProfileError):  # and nothing else
        assert isinstance(read_profile(path), Profile)


def find(folder: Path, machine: MachineFacts, pair: PairFacts) -> Found:
    """With layers that lie where they lie, whatever a profile's trees ask for."""
    return find_profile(folder, machine, (pair.target, pair.draft), lambda _: pair)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_profile(example_profile(), tmp_path / "example.toml")
    return tmp_path


def test_the_profile_of_this_pair_here_is_found(home: Path) -> None:
    found = find(home, MACHINE, PAIR)
    assert (found.profile, found.path, found.stale) == (example_profile(), home / "example.toml", ())


CARD = replace(MACHINE, accelerator="Another GPU")
MOVED = replace(PAIR, resident_layers=15, ram_layers=25)
ON_DISK = replace(PAIR, ram_layers=0, disk_layers=20)


@pytest.mark.parametrize(
    ("machine", "pair", "named"),
    [
        (CARD, PAIR, ["device name was Some GPU, is Another GPU"]),
        (replace(MACHINE, accelerator_bytes=24 << 30), PAIR, [f"device bytes was {12 << 30}, is {24 << 30}"]),
        (replace(MACHINE, num_cores=4), PAIR, ["cores was 8, is 4"]),
        (replace(MACHINE, versions={**MACHINE.versions, "torch": "2.10.0"}), PAIR, ["torch was 2.9.1, is 2.10.0"]),
        (replace(MACHINE, versions={"torch": "2.9.1"}), PAIR, ["transformers was 5.17.0, is none"]),
        (replace(MACHINE, driver="580.1"), PAIR, ["driver was 570.124, is 580.1"]),
        (MACHINE, replace(PAIR, target_fingerprint="5678"), ["target fingerprint was 1234, is 5678"]),
        (MACHINE, replace(PAIR, draft_fingerprint="efab"), ["draft fingerprint was abcd, is efab"]),
        (MACHINE, replace(PAIR, quant="int8"), ["quant was nf4, is int8"]),
        (MACHINE, replace(PAIR, draft_quant="nf4"), ["draft quant was none, is nf4"]),
        (MACHINE, replace(PAIR, dtype="float16"), ["dtype was bfloat16, is float16"]),
        (MACHINE, replace(PAIR, experts="on demand"), ["experts was with their layers, is on demand"]),
        (MACHINE, MOVED, ["resident layers was 20, is 15", "ram layers was 20, is 25"]),
        (MACHINE, ON_DISK, ["ram layers was 20, is 0", "disk layers was 0, is 20"]),
    ],
)
def test_a_profile_is_not_used_where_a_fact_changed_and_both_values_are_named(
    machine: MachineFacts, pair: PairFacts, named: list[str], home: Path
) -> None:
    found = find(home, machine, pair)
    assert found.profile is None
    assert list(found.stale) == named


@pytest.mark.parametrize(
    ("machine", "pair"),
    [
        (MACHINE, replace(PAIR, resident_layers=17, ram_layers=23)),  # 3 of 40 layers moved
        (MACHINE, replace(PAIR, resident_layers=24, ram_layers=16)),  # 10 %
        (replace(MACHINE, driver="570.86"), PAIR),
        (replace(MACHINE, versions={**MACHINE.versions, "torch": "2.9.0", "safetensors": "9"}), PAIR),
        (replace(MACHINE, system="Linux-6.2", python="3.12.2", memory_bytes=1 << 30), PAIR),
    ],
)
def test_a_profile_is_used_where_what_changed_does_not_matter(
    machine: MachineFacts, pair: PairFacts, home: Path
) -> None:
    assert find(home, machine, pair).profile == example_profile()


def with_resident(resident: int, name: str) -> Profile:
    return example_profile(name=name, pair=replace(PAIR, resident_layers=resident, ram_layers=40 - resident))


def test_of_two_profiles_the_nearer_placement_is_taken(tmp_path: Path) -> None:
    for resident, name in ((22, "a"), (19, "b"), (18, "c"), (2, "d")):
        write_profile(with_resident(resident, name), tmp_path / f"{name}.toml")
    assert find(tmp_path, MACHINE, PAIR).profile == with_resident(19, "b")
    assert find(tmp_path, MACHINE, with_resident(3, "x").pair).profile == with_resident(2, "d")


def test_a_profile_that_fits_wins_over_one_that_is_nearer(tmp_path: Path) -> None:
    write_profile(example_profile(machine=CARD), tmp_path / "a.toml")
    write_profile(with_resident(18, "b"), tmp_path / "b.toml")
    assert find(tmp_path, MACHINE, PAIR).profile == with_resident(18, "b")


@pytest.mark.parametrize("other", [replace(PAIR, target="huge"), replace(PAIR, draft="tiny")])
def test_a_profile_of_another_pair_is_not_mentioned(other: PairFacts, home: Path) -> None:
    found = find(home, MACHINE, other)
    assert (found.profile, found.path, found.stale) == (None, None, ())


def test_an_unreadable_file_does_not_disturb_the_others(home: Path) -> None:
    (home / "a.toml").write_text("name = ")
    (home / "b.toml").mkdir()
    assert find(home, MACHINE, PAIR).profile == example_profile()
    read = dict(all_profiles(home))
    assert [path.name for path, found in read.items() if isinstance(found, ProfileError)] == ["a.toml", "b.toml"]


OLDER = "another version of edgespec made it, with schema 'edgespec.profile/1', not 'edgespec.profile/5'"


def test_a_profile_of_this_pair_that_an_older_version_made_is_not_used_and_that_is_said(home: Path) -> None:
    path = home / "example.toml"
    text = changed(path.read_text(), "schema", "edgespec.profile/1")
    path.write_text(changed(text, "growth", [{"kind": "slot"}]))
    found = find(home, MACHINE, PAIR)
    assert (found.profile, found.path, found.stale) == (None, path, (OLDER,))
    write_profile(example_profile(), home / "new.toml")
    assert find(home, MACHINE, PAIR).profile == example_profile(), "it does not disturb the others"


def test_older_profiles_of_other_pairs_and_of_none_are_not_mentioned(home: Path) -> None:
    path = home / "example.toml"
    older = changed(path.read_text(), "schema", "edgespec.profile/1")
    assert find(home, MACHINE, replace(PAIR, target="huge")).stale == ()
    others = (
        changed(older, "pair.target", "huge"),
        changed(older, "pair", 7),
        changed(older, "pair", None),
        changed(older, "schema", "something/1"),
        changed(older, "schema", None),
        changed(path.read_text(), "growth", "damaged"),
    )
    for content in others:
        path.write_text(content)
        found = find(home, MACHINE, PAIR)
        assert (found.profile, found.stale) == (None, ())


def test_there_need_be_no_folder(tmp_path: Path) -> None:
    assert find(tmp_path / "none", MACHINE, PAIR).profile is None


def test_a_name_tells_pairs_and_machines_apart_and_can_name_a_file(folder: Path) -> None:
    name = profile_name(MACHINE, PAIR)
    assert name.startswith("some-gpu-big-small-")
    assert profile_name(MACHINE, replace(PAIR, resident_layers=21, ram_layers=19)) == name
    others = [
        profile_name(CARD, PAIR),
        profile_name(MACHINE, replace(PAIR, quant="none")),
        profile_name(MACHINE, replace(PAIR, draft_fingerprint="other")),
        profile_name(MACHINE, MOVED),
        profile_name(MACHINE, ON_DISK),
    ]
    assert len({name, *others}) == 6


@settings(max_examples=40)
@given(NAMES, NAMES)
def test_every_name_is_one_that_can_be_read(folder: Path, device: str, target: str) -> None:
    name = profile_name(replace(MACHINE, accelerator=device), replace(PAIR, target=target))
    write_profile(example_profile(name=name), folder / "named.toml")
    assert read_profile(folder / "named.toml").name == name
