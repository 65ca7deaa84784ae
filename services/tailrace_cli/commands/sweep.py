"""`tailrace train seed=1,2,3`: a run for each choice of values, one after another or `--jobs` at once.

Every run is a `tailrace train` of its own, named after the experiment and its values. With one job its
output is the terminal's; with more it goes to `<output_dir>/<run>.log`. Runs at once have GPUs of their
own where these suffice.
"""

import asyncio
import contextlib
import itertools
import math
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.errors import HydraException

from tailrace.config import ConfigError
from tailrace_cli.checkpoints import has_begun, reached_checkpoint, refuse_earlier
from tailrace_cli.cluster.plan import gpu_environment
from tailrace_cli.cluster.supervisor import prepare_child
from tailrace_cli.commands.runs import print_runs, runs_table
from tailrace_cli.console import stderr, stdout, tell, tell_error
from tailrace_cli.exit_codes import INTERRUPTED
from tailrace_cli.experiment import Experiment, load, with_epochs
from tailrace_cli.loading.checks import require_loadable
from tailrace_cli.loading.machine import num_usable_cores
from tailrace_cli.loading.room import gpu_shares, room_for
from tailrace_cli.reporting.pages import write_comparison
from tailrace_cli.run_folders import RunFolder
from tailrace_cli.validation import check_experiment

MAX_RUNS = 1000
_SIGNALLED = 128  # and the signal's number: exit code of a process that one has ended, as shells say it


class SweepRun(NamedTuple):
    """One run of a sweep: what its name gets, and all its overrides."""

    suffix: str
    overrides: tuple[str, ...]


def sweep_runs(overrides: Sequence[str]) -> list[SweepRun]:
    """Runs for every combination of the values of `a=1,2 b=range(3)`; empty: nothing is swept."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException:  # composing the experiment names the mistake
        return []
    if not any(each.is_sweep_override() for each in parsed):
        return []
    if doubled := _doubled(parsed):
        raise ConfigError(f"{' '.join(overrides)}: {doubled} is swept and given twice: give it once")
    choices = [_choices(*each) for each in zip(overrides, parsed, strict=True)]
    _check_number(" ".join(overrides), math.prod(map(len, choices)))
    combined = [_combined(parts) for parts in itertools.product(*choices)]
    if len({run.suffix for run in combined}) < len(combined):
        raise ConfigError(f"{' '.join(overrides)}: two runs of the sweep would have one name")
    return combined


def _combined(parts: Sequence[tuple[str, str]]) -> SweepRun:
    return SweepRun("".join(suffix for suffix, _ in parts), tuple(text for _, text in parts))


def _doubled(parsed: Sequence[Override]) -> str:
    """A key that is swept and given once more; empty: none."""
    keys = [str(each.key_or_group) for each in parsed]
    swept = (str(each.key_or_group) for each in parsed if each.is_sweep_override())
    return next((key for key in swept if keys.count(key) > 1), "")


def _choices(given: str, override: Override) -> list[tuple[str, str]]:
    """Suffix of the name and override, for each value of one override."""
    if not override.is_sweep_override():
        return [("", given)]
    key = str(override.key_or_group)
    if key == "exp_name":
        raise ConfigError(f"{given}: runs are named after the swept values; sweep another key")
    name = key.rpartition(".")[2]
    try:
        _check_range(given, override)
        values = [*map(str, override.sweep_string_iterator())]
    except HydraException as error:  # `glob()` and `interval()` name no values
        raise ConfigError(
            f"{given} names no values to sweep: list them, as in {key}=1,2, or give range()"
        ) from error
    return [(f"_{name}{_safe(value)}", f"{key}={value}") for value in values]


def _check_range(given: str, override: Override) -> None:
    """Refuses a range before its values are listed."""
    values = override.value()
    if isinstance(values, RangeSweep) and values.step:
        assert values.start is not None
        assert values.stop is not None
        _check_number(given, (values.stop - values.start) / values.step)


def _check_number(given: str, num_runs: float) -> None:
    if num_runs > MAX_RUNS:
        raise ConfigError(f"{given}: a sweep has at most {MAX_RUNS} runs")


def _safe(value: str) -> str:
    return re.sub(r"[^A-Za-z0-9-]+", "-", value).rstrip("-")


def commands_of(
    path: Path, runs: Sequence[SweepRun], options: Sequence[str]
) -> list[tuple[RunFolder, list[str]]]:
    """Folder and words of the command of each run of the experiment at `path`; checks all of them.

    A run that is to continue and has done all its steps has no words.
    """
    commands = []
    for one in runs:
        name = f"{load(path, one.overrides).run.exp_name}{one.suffix}"
        words = [*one.overrides, f"exp_name={name}"]
        experiment = load(path, words)
        if experiment.run.resume_from_checkpoint is True and not has_begun(experiment.run.run_dir):
            words.append("resume_from_checkpoint=false")  # only runs before it had begun
            experiment = load(path, words)
        refuse_earlier(experiment.run, overwrite="--overwrite" in options)
        check_experiment(experiment)
        is_done = reached_checkpoint(with_epochs(experiment).run) is not None
        command = [] if is_done else ["train", str(path), *words, *options]
        commands.append((RunFolder(experiment.run.run_dir), command))
    return commands


def slots_of(experiment: Experiment, num_jobs: int) -> list[dict[str, str]]:
    """Environment of each of `num_jobs` runs at once (0: as many as fit), for runs like this one.

    Raises `InvalidConfigError` if it cannot run here.
    """
    if num_jobs == 1:
        return [{}]
    report = require_loadable(experiment)
    assert report.machine is not None
    room = room_for(report.experiment, report.model, report.machine, num_usable_cores())
    if num_jobs == 0:
        tell(f"runs at once: {room.num_runs}; more would lack {room.limit}")
    elif num_jobs > room.num_runs:
        tell(f"--jobs {num_jobs}: {room.num_runs} would fit this machine; more lack {room.limit}")
    num_jobs = num_jobs or room.num_runs
    shares = gpu_shares(report.experiment, report.machine, num_jobs)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [gpu_environment(gpus, experiment.cluster, visible) for gpus in shares] or [{}] * num_jobs


def sweep(
    runs: Sequence[tuple[RunFolder, Sequence[str]]],
    slots: Sequence[Mapping[str, str]],
    output_dir: Path,
) -> int:
    """Run `tailrace` with the words of each run, compare the runs; returns the exit code.

    `slots`: what each of the runs at once adds to the environment.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    codes = asyncio.run(_run_all(runs, slots, output_dir))
    begun = [run for run, _ in runs if (run.path / "config.yaml").is_file()]
    if begun:
        print_runs(runs_table(begun))
        page = write_comparison(begun, output_dir / "comparison.html")
        stdout.print(f"comparison: {page}", soft_wrap=True)
    if INTERRUPTED in codes or len(codes) < len(runs):
        tell("interrupted: the same command with resume_from_checkpoint=true continues")
        return INTERRUPTED
    return max(codes, default=0)


async def _run_all(
    runs: Sequence[tuple[RunFolder, Sequence[str]]],
    slots: Sequence[Mapping[str, str]],
    output_dir: Path,
) -> list[int]:
    """Exit codes of the runs that were started."""
    room, children, free = asyncio.Semaphore(len(slots)), _Children(), list(slots)
    codes: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, children.interrupt)

    async def play(place: int, run: RunFolder, words: Sequence[str]) -> None:
        async with room:
            if children.is_interrupted:
                return
            if not words:
                stderr.print(f"run {place} of {len(runs)}: {run.path.name} has done all its steps")
                codes.append(0)
                return
            log = output_dir / f"{run.path.name}.log" if len(slots) > 1 else None
            where = f"; output in {log}" if log else ""
            stderr.print(f"run {place} of {len(runs)}: {run.path.name}{where}", soft_wrap=True)
            slot = free.pop(0)
            code = await children.run(words, slot, log)
            free.append(slot)
            codes.append(code)
            if code:
                reason = _reason(log) if log and code != INTERRUPTED else ""
                tell_error(f"run {run.path.name} ended with exit code {code}{reason}")

    await asyncio.gather(*(play(place, *each) for place, each in enumerate(runs, 1)))
    return codes


class _Children:
    """Processes of the runs: an interruption ends them in order, the next one at once."""

    def __init__(self) -> None:
        self.is_interrupted = False
        self._running: set[asyncio.subprocess.Process] = set()

    def interrupt(self) -> None:
        """Pass each signal on to all runs."""
        self.is_interrupted = True
        for child in self._running:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)

    async def run(self, words: Sequence[str], slot: Mapping[str, str], log: Path | None) -> int:
        """Run `tailrace` with these words; its exit code."""
        with _opened(log) if log else contextlib.nullcontext() as output:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tailrace", *words,
                stdout=output, stderr=output, env={**os.environ, **slot},
                start_new_session=True,  # Ctrl-C reaches this process, which passes it on
                preexec_fn=prepare_child,
            )  # fmt: skip
            self._running.add(child)
            if self.is_interrupted:  # while it was started
                with contextlib.suppress(ProcessLookupError):  # it has ended already
                    child.send_signal(signal.SIGTERM)
            code = await child.wait()
        self._running.discard(child)
        if self.is_interrupted and code == -signal.SIGTERM:
            return INTERRUPTED
        return code if code >= 0 else _SIGNALLED - code


def _opened(log: Path) -> IO[bytes]:
    """A new log, readable by its owner alone."""
    log.touch(0o600)
    return log.open("wb")


def _reason(log: Path) -> str:
    """Error that a run's output ends with, or its last line; as an end of a sentence."""
    lines = log.read_text(errors="replace").strip().splitlines()
    starts = [place for place, line in enumerate(lines) if line.startswith("error: ")]
    said = "\n".join(lines[starts[-1] if starts else -1 :])
    return f": {said.removeprefix('error: ')}" if said else ""
