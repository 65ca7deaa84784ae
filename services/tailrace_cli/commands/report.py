"""`tailrace report`: report.html of a run on this machine, or a page that compares several."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tailrace.config import ConfigError
from tailrace_cli.reporting.pages import RunReport, write_comparison
from tailrace_cli.run_folders import find_run


def report(runs: Sequence[str], output_dir: str, to: str, console: Console) -> None:
    """Write the page of runs, by name or directory, and print its path."""
    found = [find_run(run, output_dir) for run in runs]
    folder = found[0].path if len(found) == 1 else found[0].path.parent
    page = Path(to) if to else folder / ("report.html" if len(found) == 1 else "comparison.html")
    try:
        if len(found) == 1:
            RunReport(found[0]).write(page)
        else:
            write_comparison(found, page)
    except OSError as error:
        raise ConfigError(f"cannot write {page}: {error.strerror}; name a file with -o") from error
    console.print(f"report: {page}", soft_wrap=True)
