"""`tailrace init`: copies an example that the package ships into a folder of the user's."""

import shutil
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

import tailrace_cli
from tailrace.config import ConfigError
from tailrace_cli.console import stdout

_PACKAGE = Path(tailrace_cli.__file__).parent
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "node_modules", "runs")


def examples_folder() -> Path:
    """Folder of the examples: inside the installed package, or beside the sources of a checkout."""
    shipped = _PACKAGE / "examples"
    return shipped if shipped.is_dir() else _PACKAGE.parents[1] / "examples"


def examples() -> dict[str, str]:
    """Names of the examples that `tailrace train` takes, with their descriptions."""
    files = sorted(examples_folder().rglob("experiment.yaml"))
    return {str(file.parent.relative_to(examples_folder())): _description(file) for file in files}


def _description(file: Path) -> str:
    """First sentence of the comment that opens an experiment."""
    lines = []
    for line in file.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines).partition(". ")[0].rstrip(".")


def init(
    example: Annotated[str, typer.Argument(help="Name of an example; none: list them.")] = "",
    to: Annotated[str, typer.Option(help="New folder for it; default: its name, here.")] = "",
) -> None:
    """Copy an example into a folder of your own, to change it; without a name, list the examples."""
    known = examples()
    if not example:
        table = Table("example", "what it trains", box=None, pad_edge=False)
        for name, description in known.items():
            table.add_row(name, description)
        stdout.print(table)
        stdout.print("tailrace init NAME copies one.")
        return
    if example not in known:
        close = get_close_matches(example, known, 1)
        guess = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"no example {example!r}: {guess}tailrace init lists them ({', '.join(known)})"
        )
    target = Path(to or Path(example).name)
    if target.exists():
        raise ConfigError(f"{target} exists: name another folder with --to")
    try:
        shutil.copytree(examples_folder() / example, target, ignore=_LEFT_OUT)
    except OSError as error:
        raise ConfigError(
            f"cannot copy to {target}: {error.strerror or error}: name another folder with --to"
        ) from error
    stdout.print(f"{target}: now run: tailrace train {target}", soft_wrap=True)
