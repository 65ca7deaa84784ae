"""`tailrace runs`, `status`, `logs`, `stop`: runs of this machine, or of Kubernetes."""

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table
from rich.text import Text

from tailrace.config import ConfigError
from tailrace_cli.commands.options import Context, Kubeconfig, Namespace, OutputDir, Run
from tailrace_cli.console import plain_console, stdout, tell_error
from tailrace_cli.damaged import DamagedRunError
from tailrace_cli.log_text import print_log, readable
from tailrace_cli.run_folders import RunFolder, State, find_run, runs_in
from tailrace_cli.submission import releases
from tailrace_cli.submission.cluster import Cluster
from tailrace_cli.summary import last, read_health, read_metrics, summary_rows, summary_table

_STYLES: dict[State, str] = {"running": "green", "failed": "red", "interrupted": "yellow"}
_MAX_LINE = 1000  # columns of a table that no terminal shows
_POLL_S = 0.2
_TAIL_BYTES = 4 << 20  # of each log, from its end


def runs(output_dir: OutputDir = "runs") -> None:
    """List the runs of a folder: state, steps, held-out success, time."""
    table = runs_table(runs_in(output_dir))
    if not table.row_count:
        raise ConfigError(f"no run in {output_dir!r}: name another folder with --output-dir")
    print_runs(table)


def print_runs(table: Table) -> None:
    """Print a table of runs; for a file or another program each run in one line."""
    (stdout if stdout.is_terminal else plain_console(width=_MAX_LINE)).print(table)


def runs_table(found: Iterable[RunFolder]) -> Table:
    """Table of runs: state, steps, newest held-out success, time. Names are whole."""
    table = Table(Column("run", overflow="fold"), box=None, pad_edge=False)
    for name in ("state", "step", "sampled", "greedy", "time"):
        table.add_column(name, no_wrap=True)
    for run in found:
        try:
            (state, _), rows = run.state(), read_metrics(run.path)
        except DamagedRunError as error:
            table.add_row(Text(run.path.name), Text(f"damaged: {error.path.name}", style="red"))
            continue
        except OSError as error:  # such as a run of another user
            table.add_row(Text(run.path.name), Text(f"unreadable: {error.strerror}", style="red"))
            continue
        table.add_row(
            Text(run.path.name),
            Text(state, style=_STYLES.get(state, "")),
            str(rows[-1]["step"]) if rows else "-",
            _shown(last(rows, "eval/success_rate"), "{:.3f}"),
            _shown(last(rows, "eval/greedy/success_rate"), "{:.3f}"),
            _shown(last(rows, "time_s"), "{:.0f} s"),
        )
    return table


def _shown(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


def status(
    run: Run,
    output_dir: OutputDir = "runs",
    context: Context = "",
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = "",
) -> None:
    """Print where a run stands: whether it goes on, its newest figures, its failures and hints."""
    if context:
        releases.status(Cluster(context, namespace, kubeconfig), run, stdout)
        return
    found = find_run(run, output_dir)
    state, detail = found.state()
    stdout.print(
        f"{found.path}: {state}" + (f" ({detail})" if detail else ""),
        style=_STYLES.get(state, ""), soft_wrap=True,
    )  # fmt: skip
    rows, health = read_metrics(found.path), read_health(found.path)
    if rows or health.failures or health.warm_start:
        lines = summary_rows(rows, health, found.baselines, found.eval_temperature)
        stdout.print(summary_table(f"run {found.path.name}", lines))


def logs(
    run: Run,
    process: Annotated[str, typer.Argument(help="scheduler, agents, learner, ...; none: all.")] = "",
    lines: Annotated[int, typer.Option("-n", "--lines", help="Newest lines to print.", min=0)] = 50,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run ends.")] = False,
    output_dir: OutputDir = "runs",
    context: Context = "",
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = "",
) -> None:
    """Print the newest lines of a run's logs, merged by time, in a form for people."""
    if context:
        cluster = Cluster(context, namespace, kubeconfig)
        releases.logs(cluster, run, process, lines, follow, stdout)
        return
    found = find_run(run, output_dir)
    files = _log_files(found, process)
    ends = {file: _end_of(file, 0, is_torn=not follow) for file in files}
    parts = [_read(file, max(0, end - _TAIL_BYTES), end) for file, end in ends.items()]
    merged = sorted((line for part in parts for line in part), key=lambda line: line[0])
    print_log(stdout, merged[-lines:] if lines else ())
    if follow:
        _follow(found, process, ends)


def _log_files(run: RunFolder, process: str) -> list[Path]:
    files = _logs_of(run, process)
    if not files:
        names = ", ".join(sorted(file.stem for file in run.logs_dir.glob("*.log"))) or "none"
        raise ConfigError(f"no log of {process or 'any process'} in {run.logs_dir} (there: {names})")
    return files


def _logs_of(run: RunFolder, process: str) -> list[Path]:
    """Logs of the processes whose names begin so."""
    return sorted(file for file in run.logs_dir.glob("*.log") if file.name.startswith(process))


def _follow(run: RunFolder, process: str, ends: dict[Path, int]) -> None:
    """Print what is written behind `ends` (bytes), also by processes that start meanwhile, until the
    run ends. A log that became shorter was begun again."""
    is_over = False
    while not is_over:
        is_over = not run.holder
        for file in _logs_of(run, process):
            with suppress(FileNotFoundError):  # it was moved away meanwhile
                start = ends.get(file, 0)
                start = start if start <= file.stat().st_size else 0
                ends[file] = _end_of(file, start, is_torn=is_over)
                print_log(stdout, _read(file, start, ends[file]))
        if not is_over:
            time.sleep(_POLL_S)


def _end_of(file: Path, start: int, *, is_torn: bool) -> int:
    """End of the file (bytes), or unless `is_torn`, of its last complete line behind `start`."""
    with file.open("rb") as stream:
        end = stream.seek(0, os.SEEK_END)
        if is_torn:
            return end
        begin = stream.seek(max(start, end - _TAIL_BYTES))
        place = stream.read(end - begin).rfind(b"\n")
    return start if place < 0 else begin + place + 1


def _read(file: Path, start: int, end: int) -> Iterator[tuple[str, Text]]:
    """Time and text of the lines in a range of bytes; a line without a time has the one before."""
    with file.open("rb") as stream:
        stream.seek(start)
        content = stream.read(end - start)
    told = ""
    for line in content.decode(errors="replace").splitlines():
        told, text = readable(file.stem, line, told)
        yield told, text


def stop(
    run: Run,
    timeout_s: Annotated[float, typer.Option("--timeout-s", help="Longest wait for its end.")] = 120.0,
    output_dir: OutputDir = "runs",
    context: Context = "",
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = "",
) -> None:
    """End a run as Ctrl-C does: agents hand back their episodes, checkpoints stay; wait for its end.

    A submitted run (`--context`) is removed with all its objects; a volume that is kept stays.
    """
    if context:
        releases.stop(Cluster(context, namespace, kubeconfig), run, timeout_s, stdout)
        return
    found = find_run(run, output_dir)
    holder = found.holder
    if not holder:
        raise ConfigError(f"{found.path} does not run: its state is {found.state()[0]}")
    if not found.is_driven_by(holder) and found.holder:
        raise ConfigError(
            f"{found.path} is driven by process {holder} of another machine or container, or of "
            "another user: stop it there"
        )
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(holder, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while found.holder:
        if time.monotonic() > deadline:
            tell_error(f"process {holder} has not ended within {timeout_s:g} s")
            raise typer.Exit(1)
        time.sleep(_POLL_S)
    state, detail = found.state()
    stdout.print(f"{found.path}: {state}" + (f" ({detail})" if detail else ""), soft_wrap=True)
