"""`tailrace report`: report.html of a run on this machine, or a page that compares several."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tailrace_cli.reporting.pages import RunReport, write_comparison
from tailrace_cli.run_folders import find_run


def report(runs: Sequence[str], output_dir: str, to: str, console: Console) -> None:
    """Write the page of runs, by name or directory, and print its path."""
    found = [find_run(run, output_dir) for run in runs]
    if len(found) == 1:
        page = RunReport(found[0]).write(Path(to) if to else None)
    else:
        page = write_comparison(found, Path(to) if to else Path(output_dir) / "comparison.html")
    console.print(f"report: {page}", soft_wrap=True)
