"""Place of a process in the hierarchy of cgroup v2, as `/proc/self/cgroup` and `mountinfo` tell it."""

import re

_ESCAPED = re.compile(r"\\([0-7]{3})")


class NotDelegatedError(Exception):
    """Reason why the service cannot make cgroups here."""


def folder_of(cgroup: str, mountinfo: str) -> str:
    """Folder that shows the process's own cgroup; raises `NotDelegatedError`."""
    path = next((line[3:] for line in cgroup.splitlines() if line.startswith("0::")), None)
    if path is None:
        raise NotDelegatedError("the kernel has no cgroup v2")
    for line in mountinfo.splitlines():
        mount, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            root, point = (_plain(field) for field in mount.split()[3:5])
            if path == root or path.startswith(root.rstrip("/") + "/"):
                return (point + path[len(root.rstrip("/")) :]).rstrip("/")
    raise NotDelegatedError("no mounted cgroup v2 shows this process")


def _plain(field: str) -> str:
    """Path without the escapes of `mountinfo`."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), field)


def values(text: str) -> dict[str, int]:
    """Numbers by name, as `memory.stat` and `memory.events` list them."""
    return {
        name: int(number) for name, _, number in (line.partition(" ") for line in text.splitlines())
    }
