"""Where tool code runs: which interpreter, as which user, in which folder, how confined."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import stat
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailrace.config import ConfigError
from tailrace.log import get_logger
from tailrace_sandbox import metrics
from tailrace_sandbox.adapters.zygote import ENVIRONMENT, program
from tailrace_sandbox.config import SandboxConfig
from tailrace_sandbox.core.tiers import TIERS, Features, findings, tier

log = get_logger(__name__)

_SYSTEM_PYTHON = "/usr/bin/python3"
_PROBE_TIMEOUT_S = 20.0
_NUM_UIDS = 512


@dataclass(frozen=True)
class Place:
    """Made once per service by `prepare`."""

    python: str
    base: str
    features: Features
    tier: str
    config: SandboxConfig

    def start_argument(self, uid: int) -> dict[str, Any]:
        """What a zygote is started with."""
        return {
            "base": self.base,
            "uid": uid,
            "landlock": self.features.landlock_abi > 0,
            "seccomp": self.features.seccomp,
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
        """Leave nothing behind."""
        shutil.rmtree(self.base, ignore_errors=True)


async def probe(python: str) -> Features:
    """What the kernel offers to a process of this interpreter here."""
    process = await asyncio.create_subprocess_exec(
        python, "-I", "-c", program("probe"), env=ENVIRONMENT, cwd="/",
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    async with asyncio.timeout(_PROBE_TIMEOUT_S):
        output, _ = await process.communicate()
    return Features.from_dict(json.loads(output))


async def prepare(config: SandboxConfig) -> Place:
    """Find out and decide; `ConfigError` where the machine gives less than the configuration wants."""
    features = await probe(sys.executable)
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
    metrics.TIER.labels(found).set(1)
    if found != "full":
        log.warning("tool code is not fully confined", tier=found)
    python = config.python or _interpreter(features.own_user)
    base = tempfile.mkdtemp(prefix="tailrace-sandbox-", dir=config.workspace_dir or None)
    if features.own_user:
        os.chmod(base, 0o1733)  # each user makes folders here, and sees no others
    log.info("sandbox", tier=found, landlock_abi=features.landlock_abi, python=python, base=base)
    return Place(python, base, features, found, config)


def _interpreter(other_user: bool) -> str:
    """Ours, unless another user could not enter its folder."""
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
