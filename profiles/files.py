"""Profiles are TOML files: written whole, read strictly, and found by what they were measured for."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import re
import secrets
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import TypeAdapter, ValidationError

from profiles.errors import ProfileError
from profiles.schema import SCHEMA, MachineFacts, PairFacts, Profile

NUM_PROBLEMS_SHOWN = 3
# A change of one of these packages' versions may change speed.
TIMED_PACKAGES = ("torch", "transformers")
PLACEMENT_TOLERANCE = 0.1  # of the layers that may have moved
MEASURE = "Measure it: edgespec profile."


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The profile that fits, or why one that is nearly right does not."""

    profile: Profile | None
    path: Path | None
    stale: tuple[str, ...]  # facts that changed, each with both values


def write_profile(profile: Profile, path: Path) -> None:
    """Write a file that is there whole or not at all; raises ProfileError."""
    content = tomli_w.dumps(_without_none(dataclasses.asdict(profile)))
    partial = path.with_name(f".{secrets.token_hex(8)}.partial")  # which nobody can guess, and put a link there
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.touch(exist_ok=False)
        partial.write_text(content, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ProfileError(
            "E_PROFILE", f"'{path}' cannot be written ({error.strerror}).", "Choose another place: EDGESPEC_HOME."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()  # where it has not taken the name


def read_profile(path: Path) -> Profile:
    """Read and check a file; raises ProfileError with the keys that are wrong."""
    content = _read_content(path)
    found = content.get("schema")
    if found != SCHEMA:
        raise ProfileError("E_PROFILE", f"'{path}' has schema {found!r}, not '{SCHEMA}'.", MEASURE)
    try:
        return _adapter().validate_python(content)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg'].lower()}"
            for problem in error.errors(include_url=False)
        ]
        more = f" (and {len(problems) - NUM_PROBLEMS_SHOWN} more)" if len(problems) > NUM_PROBLEMS_SHOWN else ""
        raise ProfileError(
            "E_PROFILE", f"'{path}': {'; '.join(problems[:NUM_PROBLEMS_SHOWN])}{more}.", MEASURE
        ) from error


def profile_name(machine: MachineFacts, pair: PairFacts) -> str:
    """Return a name that is the same for the same machine, pair and quantisation, and nearly the same placement."""
    facts = {**_key(machine, pair), "resident": round(10 * _resident_share(pair)), "tiers": _tiers(pair)}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
    return "-".join([*(_slug(part) for part in (machine.device_name, pair.target, pair.draft)), digest])


def find_profile(
    folder: Path, machine: MachineFacts, names: tuple[str, str | None], facts_with: Callable[[Profile], PairFacts]
) -> Found:
    """Return the profile in `folder` for the pair of these names, else why the nearest one is not used.

    `facts_with` gives the pair's facts with its layers placed as a profile's trees ask for. Layers may be placed a
    little differently, as a longer prompt makes them. A file that cannot be read is skipped here: `all_profiles`
    names it. One that another version made of this pair is a reason to measure again.
    """
    outdated: tuple[Path, str] | None = None
    nearest: tuple[tuple[int, float], Path, Profile, list[str]] | None = None
    for path, profile in all_profiles(folder):
        if isinstance(profile, ProfileError):
            schema = _other_schema(path, names)
            outdated = outdated if schema is None else (path, schema)
            continue
        if (profile.pair.target, profile.pair.draft) != names:
            continue
        pair = facts_with(profile)
        changed = changes_between(profile, machine, pair)
        distance = len(changed), abs(_resident_share(profile.pair) - _resident_share(pair))
        if nearest is None or distance < nearest[0]:
            nearest = distance, path, profile, changed
    if nearest is None:
        if outdated is None:
            return Found(profile=None, path=None, stale=())
        path, schema = outdated
        made = f"another version of edgespec made it, with schema '{schema}', not '{SCHEMA}'"
        return Found(profile=None, path=path, stale=(made,))
    _, path, profile, changed = nearest
    return Found(profile=None if changed else profile, path=path, stale=tuple(changed))


def changes_between(profile: Profile, machine: MachineFacts, pair: PairFacts) -> list[str]:
    """Return the facts that times and plans depend on and that have changed, each with both values."""
    changed = _changed(_key(profile.machine, profile.pair), _key(machine, pair))
    return changed + _changed_placement(profile.pair, pair) + _changed_versions(profile.machine, machine)


def all_profiles(folder: Path) -> Iterator[tuple[Path, Profile | ProfileError]]:
    """Yield every file in the folder, read, or with the reason why it cannot be read."""
    for path in sorted(folder.glob("*.toml")):
        try:
            yield path, read_profile(path)
        except ProfileError as error:
            yield path, error


def _read_content(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ProfileError("E_PROFILE_NOT_FOUND", f"there is no profile '{path}'.", MEASURE) from error
    except (OSError, ValueError, RecursionError) as error:  # of a number of 5,000 digits, not only of TOML
        raise ProfileError("E_PROFILE", f"'{path}' cannot be read as TOML ({error}).", MEASURE) from error


def _other_schema(path: Path, names: tuple[str, str | None]) -> str | None:
    """Return the schema of a profile of the pair of these names that another version made; None for other files."""
    with contextlib.suppress(ProfileError):
        content = _read_content(path)
        schema, pair = content.get("schema"), content.get("pair")
        is_ours = isinstance(schema, str) and schema.startswith(SCHEMA.partition("/")[0] + "/") and schema != SCHEMA
        if is_ours and isinstance(pair, dict) and (pair.get("target"), pair.get("draft")) == names:
            return schema
    return None


def _key(machine: MachineFacts, pair: PairFacts) -> dict[str, Any]:
    """Return what times and plans depend on, except where the layers lie."""
    facts = {name: value for name, value in dataclasses.asdict(pair).items() if not name.endswith("_layers")}
    return {
        "device_name": machine.device_name,
        "device_bytes": machine.accelerator_bytes or 0,
        "cores": machine.num_cores,
        **facts,
    }


def _resident_share(pair: PairFacts) -> float:
    return pair.resident_layers / max(1, pair.num_layers)


def _tiers(pair: PairFacts) -> list[bool]:
    """Return whether layers stream from RAM, and whether from disk."""
    return [pair.ram_layers > 0, pair.disk_layers > 0]


def _changed_placement(old: PairFacts, new: PairFacts) -> list[str]:
    if abs(_resident_share(old) - _resident_share(new)) <= PLACEMENT_TOLERANCE and _tiers(old) == _tiers(new):
        return []
    names = ("resident_layers", "ram_layers", "disk_layers")
    return _changed({name: getattr(old, name) for name in names}, {name: getattr(new, name) for name in names})


def _changed(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [f"{name.replace('_', ' ')} was {old[name]}, is {new[name]}" for name in new if old[name] != new[name]]


def _changed_versions(old: MachineFacts, new: MachineFacts) -> list[str]:
    """Return versions of another minor release, and drivers of another major one."""
    found = []
    for package in TIMED_PACKAGES:
        before, now = old.versions.get(package, "none"), new.versions.get(package, "none")
        if before.split(".")[:2] != now.split(".")[:2]:
            found.append(f"{package} was {before}, is {now}")
    if (old.driver or "").partition(".")[0] != (new.driver or "").partition(".")[0]:
        found.append(f"driver was {old.driver}, is {new.driver}")
    return found


def _without_none(value: Any) -> Any:
    """Return the content without what is None, because TOML has no null."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value]
    return value


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:40] or "unnamed"


@functools.cache
def _adapter() -> TypeAdapter[Profile]:
    return TypeAdapter(Profile)
