"""Place of tool code: interpreter, user, folder and confinement."""

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tailrace.config import ConfigError
from tailrace.log import get_logger
from tailrace_sandbox import metrics
from tailrace_sandbox.adapters.groups import Groups, ZygoteGroup
from tailrace_sandbox.adapters.zygote import ENVIRONMENT, program
from tailrace_sandbox.config import SandboxConfig
from tailrace_sandbox.core.cgroups import NotDelegatedError
from tailrace_sandbox.core.tiers import TIERS, Features, findings, tier
from tailrace_sandbox.engine import workspace

log = get_logger(__name__)

_SYSTEM_PYTHON = "/usr/bin/python3"
_PROBE_TIMEOUT_S = 60.0
_NUM_UIDS = 512
_BASE_PREFIX = "tailrace-sandbox-"
_LOCK, _NEW_LOCK = "lock", "lock.new"


@dataclass(frozen=True)
class Place:
    """Made once per service by `prepare`."""

    python: str
    base: str
    features: Features
    tier: str
    config: SandboxConfig
    lock: IO[bytes]  # on `base`, for as long as this process lives
    groups: Groups | None  # for the zygotes; None: the zygotes' checks alone limit calls

    def start_argument(self, uid: int, group: ZygoteGroup | None) -> dict[str, Any]:
        """Argument with which a zygote starts."""
        counts_processes = group is not None and group.counts_processes
        return {
            "base": self.base,
            "uid": uid,
            "landlock": self.features.landlock_abi > 0,
            "seccomp": self.features.seccomp,
            "counts_forks": uid < 0 and self.features.counts_forks and not counts_processes,
            "group": str(group.path) if group is not None else "",
            "group_counts_processes": counts_processes,
            "readable": self.config.readable,
            "preload": self.config.preload,
        }

    def claim_user(self) -> tuple[int, socket.socket | None]:
        """A user id that no other zygote of this host has, for as long as the socket is open.

        -1 without a socket where users cannot be changed.
        """
        if not self.features.own_user:
            return -1, None
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        for uid in range(self.config.first_uid, self.config.first_uid + _NUM_UIDS):
            try:
                claim.bind(f"\0tailrace-sandbox-{uid}")
            except OSError:
                continue
            return uid, claim
        claim.close()
        raise ConfigError(f"sandbox: no free user id from {self.config.first_uid} on")

    def remove(self) -> None:
        """Remove the folder."""
        if self.groups is not None:
            self.groups.close()
        self.lock.close()
        _remove(self.base)


async def probe(python: str) -> Features:
    """Features that the kernel offers to a process of this interpreter."""
    process = await asyncio.create_subprocess_exec(
        python, "-I", "-c", program("probe"), env=ENVIRONMENT, cwd="/",
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    async with asyncio.timeout(_PROBE_TIMEOUT_S):
        output, _ = await process.communicate()
    return Features.from_dict(json.loads(output))


async def prepare(
    config: SandboxConfig, find_features: Callable[[str], Awaitable[Features]] = probe
) -> Place:
    """Probe and decide; `ConfigError` if the machine offers less than the configuration demands."""
    features = await find_features(sys.executable)
    found = _accepted_tier(features, config)
    metrics.TIER.labels(found).set(1)
    if found != "full":
        log.warning("tool code is not fully confined", tier=found)
    python = _program(config.python or interpreter(features.own_user))
    base, lock = _make_base(config.workspace_dir, features.own_user)
    groups = _open_groups()
    log.info("sandbox", tier=found, landlock_abi=features.landlock_abi, python=python, base=base)
    return Place(python, base, features, found, config, lock, groups)


def _open_groups() -> Groups | None:
    """Cgroups for calls where the service may make some; tells in the log and as a metric."""
    try:
        groups = Groups.open()
    except NotDelegatedError as error:
        log.info("the memory of calls is limited by checks", no_cgroup=str(error))
        metrics.MEMORY_LIMIT.labels("checks").set(1)
        return None
    log.info("the memory of calls is limited by cgroups", cgroup=str(groups.path))
    metrics.MEMORY_LIMIT.labels("cgroup").set(1)
    return groups


def _accepted_tier(features: Features, config: SandboxConfig) -> str:
    found = tier(features)
    if TIERS.index(found) < TIERS.index(config.tier):
        missing = [
            f"{line.what}: {line.state} ({line.remedy})"
            for line in findings(features)
            if not line.is_fine
        ]
        raise ConfigError(
            f"sandbox.tier is {config.tier!r}, but this machine gives {found!r}: {'; '.join(missing)}. "
            "Mend that, or, if something else isolates the service, set sandbox.tier to what is there"
        )
    return found


def _make_base(folder: str, own_user: bool) -> tuple[str, IO[bytes]]:
    """Make the locked folder that holds the folders of calls; remove those of killed services."""
    folder = folder or tempfile.gettempdir()
    try:
        names = os.listdir(folder)
        base = tempfile.mkdtemp(prefix=_BASE_PREFIX, dir=folder)
    except OSError as error:
        raise ConfigError(
            f"sandbox.workspace_dir: cannot use {folder}: {error.strerror}: name a folder that the "
            "service may write"
        ) from error
    for name in names:
        if name.startswith(_BASE_PREFIX):
            _remove_if_left(os.path.join(folder, name))
    lock = open(os.path.join(base, _NEW_LOCK), "wb")  # noqa: SIM115 - held until the end
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(lock.name, os.path.join(base, _LOCK))  # others never find it there and free
    if own_user:
        os.chmod(base, 0o1733)  # each user makes folders here, and sees no others
    return base, lock


def _remove_if_left(base: str) -> None:
    """Remove it if it is ours and its lock is free; one without a lock is being made."""
    with contextlib.suppress(OSError):
        found = os.lstat(base)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return
        with open(os.open(os.path.join(base, _LOCK), os.O_RDONLY | os.O_NOFOLLOW), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(base)


def _remove(base: str) -> None:
    """Calls leave trees too deep for `shutil.rmtree` if their zygote was killed.

    One that only lost its service removes its folder at the same time.
    """
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(base)):
            with contextlib.suppress(FileNotFoundError):
                if entry.is_dir(follow_symlinks=False):
                    workspace.remove(entry.path)
                else:
                    os.unlink(entry.path)
        os.rmdir(base)


def _program(name: str) -> str:
    """Path of a program, for processes that start elsewhere."""
    found = shutil.which(name)
    if found is None:
        raise ConfigError(f"sandbox.python: {name} is no program here; leave it out, or name another")
    return os.path.abspath(found)


def interpreter(other_user: bool) -> str:
    """Interpreter of tool code by default: ours, unless another user could not enter its folder."""
    if not other_user or (_is_open_to_all(Path(sys.base_prefix)) and _is_open_to_all(Path(sys.prefix))):
        return sys.executable
    if os.access(_SYSTEM_PYTHON, os.X_OK):
        return _SYSTEM_PYTHON
    raise ConfigError(
        f"sandbox: only root may enter {sys.base_prefix}, and there is no {_SYSTEM_PYTHON}: "
        "set sandbox.python to an interpreter that all may run, or run the service as another user"
    )


def _is_open_to_all(path: Path) -> bool:
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in (path, *path.parents))
