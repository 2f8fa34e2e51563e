"""Fetch the page's libraries from npm: packages of named versions, whose bytes are known.

    python -m scripts.make.page_libraries            writes edgespec/serve/page/libraries anew
    python -m scripts.make.page_libraries --check    says what would change, and exits 1 if anything does

A new version needs its checksum here: `npm pack NAME@VERSION; sha256sum FILE`. Files are as npm has them, without the
last line that names a source map.
"""

import argparse
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "edgespec/serve/page/libraries"
SOURCE_MAP = (b"//# sourceMappingURL=", b"/*# sourceMappingURL=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package of npm, and which of its files the page has."""

    name: str
    version: str
    sha256: str
    files: dict[str, str]  # in the package -> in the folder; a name that ends in a slash is a folder
    ending: str = ""  # of a folder's files


PACKAGES = (
    Package(
        name="marked", version="18.2.1", sha256="d66c5213fc203466186060105b01f51896764ba64b3797d2620d02e28e34b8ca",
        files={"lib/marked.esm.js": "marked.esm.js", "LICENSE": "marked.LICENSE"},
    ),
    Package(
        name="dompurify", version="3.4.18", sha256="8b86f79c6481fec23dd81d4de32179422668912ed033c0c47e786a6e70cb3379",
        files={"dist/purify.min.js": "purify.min.js", "LICENSE": "purify.LICENSE"},
    ),
    Package(
        name="@highlightjs/cdn-assets", version="11.12.0",
        sha256="b8a006d30f45afe783072569f3d69c5b60c0e7b9ca28cd474e12f2584e2a3bd9",
        files={"es/highlight.min.js": "highlight.min.js", "LICENSE": "highlight.LICENSE"},
    ),
    Package(
        name="katex", version="0.19.1", sha256="24da5a599eb2fcede2e270b99a6ff48bca816beecc95feeb84e8cccbd1bb34fd",
        files={
            "dist/katex.min.js": "katex.min.js", "dist/katex.min.css": "katex.min.css", "LICENSE": "katex.LICENSE",
            "dist/fonts/": "fonts/",
        },
        ending=".woff2",  # which every browser of today reads
    ),
)  # fmt: skip


def packed(package: Package, folder: Path) -> Path:
    """Fetch a package and return its file; exits where its bytes are others."""
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), f"{package.name}@{package.version}"]
    name = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
    found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    if found != package.sha256:
        sys.exit(f"{package.name} {package.version} has the checksum {found}, and {package.sha256} was expected")
    return folder / name


def files_of(package: Package, file: Path) -> dict[str, bytes]:
    """Return the page's files of a package, by their names in the folder."""
    found: dict[str, bytes] = {}
    with tarfile.open(file) as content:
        for member in content:
            inside = member.name.removeprefix("package/")
            for source, name in package.files.items():
                is_below = source.endswith("/") and inside.startswith(source) and inside.endswith(package.ending)
                if inside == source or is_below:
                    stream = content.extractfile(member)
                    assert stream is not None
                    found[name + inside.removeprefix(source)] = without_source_map(stream.read())
    return found


def without_source_map(content: bytes) -> bytes:
    """Return a file without its last line, where that names a source map."""
    body, _, last = content.rstrip(b"\n").rpartition(b"\n")
    return body + b"\n" if last.startswith(SOURCE_MAP) else content


def main() -> None:
    """Write the folder, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    given = parser.parse_args()
    wanted: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        for package in PACKAGES:
            wanted |= files_of(package, packed(package, Path(folder)))
    here = {str(path.relative_to(FOLDER)): path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}
    changed = sorted(name for name in wanted.keys() | here.keys() if wanted.get(name) != here.get(name))
    for name in changed:
        print(name, "changes" if name in wanted and name in here else "is new" if name in wanted else "goes")
        if not given.check and name in wanted:
            (FOLDER / name).parent.mkdir(exist_ok=True)
            (FOLDER / name).write_bytes(wanted[name])
        elif not given.check:
            (FOLDER / name).unlink()
    print(f"{len(wanted)} files, {sum(map(len, wanted.values())):,} bytes, {len(changed)} changed")
    sys.exit(1 if given.check and changed else 0)


if __name__ == "__main__":
    main()
