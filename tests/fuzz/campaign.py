"""Campaign: many inputs for many targets, their counts, and a file for each input that fails.

Invariants: an input follows from target, seed and index; an input that takes more than `MAX_INPUT_S`
counts as a dead loop.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.decoders import RefusedError, Target

MAX_INPUT_S = 10.0  # of the processor: a busy machine takes none of it
_MAX_KEPT = 20  # failing inputs of one target


class DeadLoopError(Exception):
    """An input was not handled within `MAX_INPUT_S`."""


@dataclass
class Tally:
    """Counts of one target; `grown_mib` is the growth of this process over the target's inputs."""

    target: str
    num_inputs: int = 0
    num_taken: int = 0
    num_refused: int = 0
    num_crashes: int = 0
    num_dead_loops: int = 0
    seconds: float = 0.0
    grown_mib: float = 0.0
    failures: list[str] = field(default_factory=list)


def rss_mib(process: int | str = "self") -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def counts_of(targets: Sequence[Target], num_inputs: int) -> dict[str, int]:
    """Number of inputs of each target, by share; they sum to at least `num_inputs`."""
    whole = sum(target.share for target in targets)
    return {target.name: -int(-num_inputs * target.share // whole) for target in targets}


def play(target: Target, seed: int, indices: range, folder: Path) -> Tally:
    """Gives a target its inputs; keeps those that fail as files in `folder`."""
    tally = Tally(target.name)
    began_s, before = time.monotonic(), rss_mib()
    for index in indices:
        data = target.input_of(seed, index)
        tally.num_inputs += 1
        with _noted(tally, data, f"{seed}-{index}", folder):
            _run(target.run, data)
    tally.seconds, tally.grown_mib = time.monotonic() - began_s, rss_mib() - before
    return tally


def _run(run: Callable[[bytes], None], data: bytes) -> None:
    signal.signal(signal.SIGVTALRM, _on_alarm)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_INPUT_S)
    try:
        run(data)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)


def _on_alarm(*_: object) -> None:
    raise DeadLoopError(f"not handled within {MAX_INPUT_S:g} s")


@contextmanager
def _noted(tally: Tally, data: bytes, name: str, folder: Path) -> Iterator[None]:
    """Counts the outcome of one input."""
    try:
        yield
    except RefusedError:
        tally.num_refused += 1
    except DeadLoopError as error:
        tally.num_dead_loops += 1
        _keep(tally, data, name, folder, error)
    except Exception as error:  # noqa: BLE001 - any other exception is what a campaign looks for
        tally.num_crashes += 1
        _keep(tally, data, name, folder, error)
    else:
        tally.num_taken += 1


def _keep(tally: Tally, data: bytes, name: str, folder: Path, error: Exception) -> None:
    if len(tally.failures) >= _MAX_KEPT:
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{tally.target.replace('/', '-')}-{name}.bin"
    path.write_bytes(data)
    tally.failures.append(
        f"{type(error).__name__}: {error}\n"
        f"  again: python -m tests.fuzz --target {tally.target} --replay {path}"
    )
