"""The control groups of this process, in which Linux and containers state its limits."""

from collections.abc import Iterator
from pathlib import Path


def cgroup_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """Yield the folders that may limit this process: its own group's and those above it, each with its version, 1 or 2.

    Not all of them exist; other systems than Linux have none. `root` is the folder of the system's files.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, places = 2, ["sys/fs/cgroup"]
        elif controller in controllers.split(","):
            version, places = 1, [f"sys/fs/cgroup/{controllers}", f"sys/fs/cgroup/{controller}"]
        else:
            continue
        below = Path(path.strip("/"))
        # A container may see its path on the host, and only the end of it mounted: the mount itself counts, too.
        for place in places:
            for part in (below, *below.parents):
                yield version, root / place / part
