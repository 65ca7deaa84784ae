"""`tailrace init`: copies an example that the package ships into a folder of the user's.

In the copy, commands name the new folder, and links to the documentation lead to the pages that the
package ships.
"""

import re
import shlex
import shutil
import stat
from collections.abc import Mapping
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

import tailrace_cli
from tailrace.config import ConfigError
from tailrace_cli.console import stdout

_PACKAGE = Path(tailrace_cli.__file__).parent
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "node_modules", "runs")
_TEXTS = (".md", ".yaml")
_TO_DOCS = re.compile(r"\]\((?:\.\./)+docs/")


def examples_folder() -> Path:
    """Folder of the examples: inside the installed package, or beside the sources of a checkout."""
    return _shipped("examples")


def docs_folder() -> Path:
    """Folder of the documentation, in the same places."""
    return _shipped("docs")


def _shipped(name: str) -> Path:
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parents[1] / name


def examples() -> dict[str, str]:
    """Names of the examples with their descriptions: experiments, then folders with a page alone."""
    folder = examples_folder()
    experiments = sorted(folder.rglob("experiment.yaml"))
    known = {file.parent for file in experiments}
    pages = [page for page in sorted(folder.glob("*/README.md")) if page.parent not in known]
    return {str(file.parent.relative_to(folder)): _description(file) for file in (*experiments, *pages)}


def _description(file: Path) -> str:
    """First sentence of the comment that opens an experiment, or of the page below its title."""
    lines = file.read_text(encoding="utf-8").splitlines()
    if file.suffix == ".md":
        lines = [f"# {line}" for line in lines[2:]]
    comment = takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line.removeprefix("#").strip() for line in comment).partition(". ")[0].rstrip(".")


def init(
    example: Annotated[str, typer.Argument(help="Name of an example; none: list them.")] = "",
    to: Annotated[str, typer.Option(help="New folder for it; default: its name, here.")] = "",
) -> None:
    """Copy an example into a folder of your own, to change it; without a name, list the examples."""
    known = examples()
    example = example.rstrip("/").removeprefix("examples/")  # as a shell completes its folder
    if not example:
        _list(known)
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
        _copy(example, target)
    except OSError as error:
        raise ConfigError(
            f"cannot copy to {target}: {error.strerror or error}: name another folder with --to"
        ) from error
    is_experiment = (target / "experiment.yaml").is_file()
    what = (
        f"run: tailrace train {shlex.quote(str(target))}"
        if is_experiment
        else f"follow {target / 'README.md'}"
    )
    stdout.print(f"{target}: now {what}", soft_wrap=True)


def _list(known: Mapping[str, str]) -> None:
    table = Table("example", "content", box=None, pad_edge=False)
    for name, description in known.items():
        table.add_row(name, description)
    stdout.print(table)
    stdout.print("tailrace init NAME copies one.")
    stdout.print(f"Documentation: {docs_folder() / 'index.md'}", soft_wrap=True)


def _copy(example: str, target: Path) -> None:
    shutil.copytree(examples_folder() / example, target, ignore=_LEFT_OUT)
    for path in (target, *target.rglob("*")):  # the package may be installed for reading alone
        path.chmod(path.stat().st_mode | stat.S_IWUSR)
    _settle(example, target)


def _settle(example: str, target: Path) -> None:
    """Let commands and links in a copy lead somewhere."""
    own = re.compile(rf"examples/{re.escape(example)}(?!\w)")
    for file in target.rglob("*"):
        if file.suffix in _TEXTS and file.is_file():
            text = own.sub(lambda _: shlex.quote(str(target)), file.read_text(encoding="utf-8"))
            file.write_text(_TO_DOCS.sub(lambda _: f"]({docs_folder()}/", text), encoding="utf-8")
