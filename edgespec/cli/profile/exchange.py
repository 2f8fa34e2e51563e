"""A kept profile copied to a file, and a file's profile kept, where it is of the pair and replaces nothing unasked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.cli.console import Console
from edgespec.cli.open_pair import open_pair_with_draft
from edgespec.cli.options.machine import MachineOptions
from edgespec.cli.options.model import ModelOptions
from edgespec.cli.spelling import spelled
from edgespec.errors import EdgespecError, profile_errors
from edgespec.placement.pair_setup import kept_profile, set_up_by_profile
from edgespec.placement.run_config import DEFAULT_CONTEXT_TOKENS
from edgespec.tree.settings import TreeOptions
from edgespec.user_paths import profiles_folder
from profiles.errors import ProfileError
from profiles.files import read_profile, write_profile

if TYPE_CHECKING:
    from edgespec.pair.pair import ModelPair
    from edgespec.placement.run_config import RunConfig
    from profiles.schema import Profile


def export_profile(
    models: ModelOptions, machine: MachineOptions, path: Path, *, overwrite: bool
) -> tuple[Profile, str]:
    """Copy the kept profile of the pair; return it, and what is to be said. Raises EdgespecError without one."""
    if path.exists() and not overwrite:
        raise EdgespecError("E_OUTPUT_EXISTS", f"'{path}' exists.", "Choose another file, or give --overwrite.")
    profile = kept_profile(*_placed(models, machine))
    with profile_errors():
        write_profile(profile, path)
    return profile, f"copied to {path}"


def import_profile(
    console: Console, models: ModelOptions, machine: MachineOptions, path: Path, *, overwrite: bool
) -> tuple[Profile, str]:
    """Keep a file's profile; return it, and what is to be said.

    Raises EdgespecError where it is of another pair, or where another profile would be replaced.
    """
    with profile_errors():
        profile = read_profile(path)
    pair, run_config = _placed(models, machine)
    setup = set_up_by_profile(pair, run_config, TreeOptions(profile=str(path)), temperature=0.0)
    own_path = profiles_folder() / f"{profile.name}.toml"
    before = _read(own_path)
    if before == profile:
        return profile, f"kept already as {own_path}"
    if own_path.exists() and not overwrite:
        measured = f", measured {before.created}" if before is not None else ""
        what = f"another profile is kept as '{own_path}'{measured}; this one was measured {profile.created}."
        raise EdgespecError("E_OUTPUT_EXISTS", what, "Give --overwrite to replace it.")
    if setup.differences:
        console.say(f"{spelled(setup.notes[0])}; runs here leave it aside, unless --profile {path} names it")
    with profile_errors():
        write_profile(profile, own_path)
    return profile, f"kept as {own_path}"


def _placed(models: ModelOptions, machine: MachineOptions) -> tuple[ModelPair, RunConfig]:
    pair = open_pair_with_draft(models, "profile the target with")
    return pair, machine.run_config(pair, context_tokens=machine.ctx_size or DEFAULT_CONTEXT_TOKENS)


def _read(path: Path) -> Profile | None:
    try:
        return read_profile(path)
    except ProfileError:  # none, or one that cannot be read
        return None
