"""`tailrace report`: the page of a run, or one that compares runs."""

from pathlib import Path
from typing import Annotated

import typer

from tailrace.config import ConfigError
from tailrace_cli.commands.options import OutputDir
from tailrace_cli.console import stdout
from tailrace_cli.reporting.pages import RunReport, write_comparison
from tailrace_cli.run_folders import find_run


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Names or directories of runs.")],
    output: Annotated[
        str, typer.Option("-o", "--output", help="File or folder to write to; default: the run's own.")
    ] = "",
    output_dir: OutputDir = "runs",
) -> None:
    """Write report.html of a run as it stands; of several runs, comparison.html with all of them."""
    found = [find_run(run, output_dir) for run in runs]
    folder = found[0].path if len(found) == 1 else found[0].path.parent
    page = Path(output or folder)
    if page.is_dir():
        page /= "report.html" if len(found) == 1 else "comparison.html"
    try:
        if len(found) == 1:
            RunReport(found[0]).write(page)
        else:
            write_comparison(found, page)
    except OSError as error:
        raise ConfigError(f"cannot write {page}: {error.strerror}; name a file with -o") from error
    stdout.print(f"report: {page}", soft_wrap=True)
