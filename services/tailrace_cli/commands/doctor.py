"""`tailrace doctor`: what this machine gives, what is missing, and what to do about it.

Exit code 0 if everything that a run needs is here and tool code can be fully confined, else 1.
"""

import asyncio
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tailrace.config import ConfigError
from tailrace_cli.cluster.servers import nats_server_binary, redis_server_binary
from tailrace_cli.commands.doctor_engine import doctor_engine
from tailrace_cli.config import ClusterConfig
from tailrace_cli.console import stdout
from tailrace_cli.loading.machine import num_usable_cores, usable_memory_bytes
from tailrace_sandbox.adapters.groups import delegated_folder
from tailrace_sandbox.adapters.place import interpreter, probe
from tailrace_sandbox.core.cgroups import NotDelegatedError
from tailrace_sandbox.core.tiers import Features, findings, tier

FindFeatures = Callable[[str], Awaitable[Features]]  # of the kernel, by an interpreter's path

_VERSION_TIMEOUT_S = 60.0
_MIN_MEMORY_BYTES = 2 << 30
_PACKAGES = {
    "torch": "pip install 'tailrace[all]'",
    "transformers": "pip install 'tailrace[all]'",
    "nats-py": "pip install 'tailrace[all]'",
    "redis": "pip install 'tailrace[all]'",
}


@dataclass(frozen=True)
class DoctorLine:
    """One row of the report. `remedy`: what to do; empty where nothing is wrong."""

    what: str
    state: str
    remedy: str = ""
    is_needed: bool = True  # whether its absence makes the exit code 1


def doctor(
    engine: Annotated[
        str, typer.Option(help="Check this engine with --model: torch, vllm, sglang, hf, module:Class.")
    ] = "",
    model: Annotated[str, typer.Option(help="Folder of the model for --engine.")] = "",
    engine_args: Annotated[str, typer.Option(help="Arguments of the engine, as JSON.")] = "",
) -> None:
    """Say what this machine gives, what is missing, and what to do about it."""
    if engine or model or engine_args:
        raise typer.Exit(doctor_engine(stdout, engine or "torch", model, engine_args))
    raise typer.Exit(report_machine(stdout))


def report_machine(console: Console, find_features: FindFeatures = probe) -> int:
    """Print the report; the exit code. `find_features` asks the kernel what it can confine."""
    lines = [*_machine(), *_servers(), *_packages(), *_sandbox(find_features)]
    table = Table(box=None, pad_edge=False)
    for title in ("", "what", "here", "remedy"):
        table.add_column(title, overflow="fold")
    for line in lines:
        mark = "ok" if not line.remedy else "MISSING" if line.is_needed else "note"
        table.add_row(mark, line.what, line.state, line.remedy)
    console.print(table)
    return 1 if any(line.remedy and line.is_needed for line in lines) else 0


def _machine() -> Iterator[DoctorLine]:
    cores = num_usable_cores()
    yield DoctorLine("system", platform.platform())
    yield DoctorLine("Python", platform.python_version())
    yield DoctorLine(
        "CPU cores",
        str(cores),
        "" if cores >= 2 else "a local cluster runs on one core, but slowly",
        is_needed=False,
    )
    memory_bytes = usable_memory_bytes()
    yield DoctorLine(
        "memory",
        f"{memory_bytes / 2**30:.1f} GiB",
        "" if memory_bytes >= _MIN_MEMORY_BYTES else "a local cluster wants 2 GiB or more",
        is_needed=False,
    )
    shm = Path("/dev/shm")
    yield DoctorLine(
        "shared memory",
        str(shm) if shm.is_dir() and os.access(shm, os.W_OK) else "missing",
        "" if shm.is_dir() and os.access(shm, os.W_OK) else "mount a tmpfs at /dev/shm for weights",
    )


def _servers() -> Iterator[DoctorLine]:
    for name, find in (("nats-server", nats_server_binary), ("redis-server", redis_server_binary)):
        try:
            binary = str(find(ClusterConfig()))
        except ConfigError as error:
            yield DoctorLine(name, "missing", str(error))
            continue
        yield _version(name, binary)


def _version(name: str, binary: str) -> DoctorLine:
    try:
        done = subprocess.run(
            [binary, "--version"],
            capture_output=True,
            text=True,
            timeout=_VERSION_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return DoctorLine(
            name, f"{binary} does not run: {error}", "install it again, or name another one"
        )
    return DoctorLine(name, " ".join(done.stdout.split()[:4]))


def _packages() -> Iterator[DoctorLine]:
    for package, remedy in _PACKAGES.items():
        try:
            yield DoctorLine(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield DoctorLine(package, "missing", remedy)


def _sandbox(find_features: FindFeatures) -> Iterator[DoctorLine]:
    """The confinement of tool code, tried in the way in which the sandbox service would."""
    if sys.platform != "linux":
        remedy = "run the sandbox service in a Linux container"
        yield DoctorLine("sandbox", "no Linux", remedy, is_needed=False)
        return
    try:
        features = asyncio.run(_ask(find_features))
    except (OSError, ValueError, TimeoutError) as error:
        yield DoctorLine(
            "sandbox", f"cannot be tried out: {error}", "report what `python -I` says here"
        )
        return
    for finding in findings(features):
        yield DoctorLine(finding.what, finding.state, finding.remedy)
    yield _interpreter(features)
    yield _memory_limit()
    found = tier(features)
    otherwise = f"mend the above, or set sandbox.tier={found} and isolate the service"
    yield DoctorLine("sandbox tier", found, "" if found == "full" else otherwise)


def _interpreter(features: Features) -> DoctorLine:
    """The interpreter whose packages tool code has, where nothing names another one."""
    try:
        found = interpreter(features.own_user)
    except ConfigError as error:
        return DoctorLine("Python of tool code", "none", str(error), is_needed=False)
    remedy = (
        f"the user of tool code may not enter {sys.prefix}: for other packages name an interpreter "
        "that all may run in sandbox.python"
    )
    return DoctorLine(
        "Python of tool code", found, "" if found == sys.executable else remedy, is_needed=False
    )


def _memory_limit() -> DoctorLine:
    """Either way is fine; the cgroups are of the shell in which this runs."""
    try:
        return DoctorLine("memory of tool code", f"limited by cgroups in {delegated_folder()}")
    except NotDelegatedError as error:
        return DoctorLine("memory of tool code", f"limited by checks, no cgroups: {error}")


async def _ask(find_features: FindFeatures) -> Features:
    return await find_features(sys.executable)
