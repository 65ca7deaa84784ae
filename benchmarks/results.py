"""Output of every benchmark: a table on the terminal and `benchmarks/results/<name>.json`.

The file says on which machine, with which versions and of which commit the rows were measured, and
which targets they hold. A benchmark exits with `Results.exit_code`, so that a missed target fails its
make target.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

RESULTS_DIR = Path(__file__).parent / "results"
# What benchmarks write themselves: it makes no other code of a commit.
_WRITTEN = ("benchmarks/results", "docs/results", "docs/results.md")

Cell = str | int | float | bool | None


class Target(msgspec.Struct, frozen=True):
    """A number that a benchmark promises."""

    what: str
    value: float
    goal: str  # ">= 6" or "<= 0.333"
    holds: bool


class Results:
    """Rows and targets of one benchmark run."""

    def __init__(self, name: str, packages: Iterable[str], **settings: Cell) -> None:
        self.name = name
        self.rows: list[dict[str, Cell]] = []
        self.targets: list[Target] = []
        self.commit = commit_of(RESULTS_DIR)
        self._packages = tuple(packages)
        self._versions: dict[str, str] = {}  # of packages in other environments
        self._settings = settings

    def add(self, **cells: Cell) -> None:
        """One row; floats are rounded to four significant digits."""
        self.rows.append({key: _rounded(value) for key, value in cells.items()})

    def add_version(self, package: str, version: str) -> None:
        """Records the versions of a side that runs in its own virtual environment."""
        self._versions[package] = version

    def at_least(self, what: str, value: float, goal: float) -> None:
        """A target that `value` must reach."""
        self.targets.append(Target(what, float(_rounded(value) or 0), f">= {goal:.4g}", value >= goal))

    def at_most(self, what: str, value: float, goal: float) -> None:
        """A target that `value` must not exceed."""
        self.targets.append(Target(what, float(_rounded(value) or 0), f"<= {goal:.4g}", value <= goal))

    @property
    def exit_code(self) -> int:
        """0 if every target holds, else 1."""
        return 0 if all(target.holds for target in self.targets) else 1

    def write(self, directory: Path = RESULTS_DIR) -> Path:
        """Write the file and return its path; rows that name no commit are of this process's code."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.name}.json"
        content = {
            "benchmark": self.name,
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": versions(self._packages) | self._versions,
            "settings": self._settings,
            "rows": [row if "commit" in row else {**row, "commit": self.commit} for row in self.rows],
            "targets": [msgspec.to_builtins(target) for target in self.targets],
        }
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return path

    def show(self) -> None:
        """Print rows and targets."""
        print(table(self.rows))
        for target in self.targets:
            mark = "holds" if target.holds else "MISSED"
            print(f"{mark:>6}  {target.what}: {target.value:g} (goal {target.goal})")


def table(rows: Sequence[dict[str, Cell]]) -> str:
    """Rows as aligned text, columns in the order they first occur."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_text(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def median(values: Iterable[float]) -> float:
    """The middle of several rounds: what a disturbed machine spoils least."""
    return statistics.median(values)


def machine() -> dict[str, Cell]:
    """Properties that the numbers depend on: processor, usable cores, memory, system, Python."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average_1m": round(os.getloadavg()[0], 2),
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Installed versions of the packages that were measured."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit_of(folder: Path) -> str:
    """The commit that `folder` is of, with `-dirty` when files differ from it; empty without git."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        others = (f":(top,exclude){path}" for path in _WRITTEN)
        changed = _git(folder, "status", "--porcelain", "--", ":/", *others)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{commit}-dirty" if changed else commit


def _git(folder: Path, *arguments: str) -> str:
    argv = ["git", "-C", str(folder), *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _rounded(value: Cell) -> Cell:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _text(value: Cell) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
