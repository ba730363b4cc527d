"""The control groups that bound this process, as far as they can be seen from within a container. Of both kinds."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

GROUPS, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def control_groups(controller: str, groups: Path = GROUPS, mount: Path = MOUNT) -> Iterator[Path]:
    """Folders whose files say what this process has of it: its own group's, and those of all around it."""
    with contextlib.suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = mount / controller if controllers else mount
            folder = root / path.lstrip("/")
            yield from (one for one in (folder, *folder.parents) if one.is_relative_to(root))
