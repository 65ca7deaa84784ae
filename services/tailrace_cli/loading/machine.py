"""Memory, processors and accelerators of this machine, as a process of the run may use them.

Containers, batch systems and systemd limit processes by cgroups; each group above the own one counts.
"""

import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tailrace_cli.loading.facts import MachineFacts

_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_ACCELERATORS = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def machine_facts(*, asks_torch: bool) -> MachineFacts:
    """Memory and GPUs; torch is asked with `asks_torch` and where a GPU may be."""
    shm = Path("/dev/shm")
    asks = asks_torch or any(map(os.path.exists, _ACCELERATORS))
    return MachineFacts(
        host_bytes=usable_memory_bytes(),
        shm_bytes=shutil.disk_usage(shm).free if shm.is_dir() else 0,
        gpu_bytes=_gpu_bytes() if asks else (),
    )


def usable_memory_bytes(groups: Path = _GROUPS, own: Path = _OWN_GROUPS) -> int:
    """Memory that this process may use: the machine's, or the limit of its container or job.

    `groups`: where cgroups are mounted; `own`: file that names those of the process.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (
        _read(folder / name)
        for controller, name in (("", "memory.max"), ("memory", "memory.limit_in_bytes"))
        for folder in _own_folders(controller, groups, own)
    )
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


def num_usable_cores(groups: Path = _GROUPS, own: Path = _OWN_GROUPS) -> int:
    """Cores that this process may use, at least 1: those of its affinity, or what its quota makes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [_read(folder / "cpu.max") for folder in _own_folders("", groups, own)]
    quotas += [
        f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
        for folder in _own_folders("cpu", groups, own)
    ]
    shares = [quota.split() for quota in quotas]  # microseconds, of each period of so many
    limits = (int(used) // int(of) for used, of in filter(_is_limit, shares))
    return max(1, min([cores, *limits]))


def _is_limit(share: list[str]) -> bool:
    return len(share) == 2 and all(part.isdigit() for part in share) and share[1] != "0"


def _own_folders(controller: str, groups: Path, own: Path) -> Iterator[Path]:
    """Folders of the process's group of a controller and of those above; empty: version 2's."""
    for line in _read(own).splitlines():
        _, controllers, group = line.split(":", 2)
        if controller in controllers.split(","):
            top = groups / controller
            below = top / group.lstrip("/")
            yield below
            yield from (folder for folder in below.parents if folder.is_relative_to(top))


def _read(path: Path) -> str:
    """Content of a file of the kernel; empty without it, as where a container hides a group."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _gpu_bytes() -> tuple[int, ...]:
    torch: Any = importlib.import_module("torch")
    cuda = torch.cuda
    if not cuda.is_available():
        return ()
    return tuple(cuda.get_device_properties(index).total_memory for index in range(cuda.device_count()))
