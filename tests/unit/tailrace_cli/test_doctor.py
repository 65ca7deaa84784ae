"""`tailrace doctor`: its report and its exit code."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tailrace_cli.commands.doctor import report_machine
from tailrace_sandbox.adapters.place import probe
from tailrace_sandbox.core.tiers import Features, tier

FULL = Features(
    "x86_64", 7, seccomp=True, is_root=True, own_user=True, counts_forks=True, lists_children=True
)


def reporting(features: Features) -> Callable[[str], Awaitable[Features]]:
    """A kernel that offers these."""

    async def find_features(_python: str) -> Features:
        return features

    return find_features


def report(find_features: Callable[[str], Awaitable[Features]]) -> tuple[int, dict[str, str]]:
    """The exit code, and the report's lines by their subject."""
    shown = io.StringIO()
    exit_code = report_machine(Console(file=shown, width=400), find_features)
    lines = [line.split(None, 1) for line in shown.getvalue().splitlines()[1:]]
    return exit_code, {" ".join(rest.split()): mark for mark, rest in lines}


def mark_of(lines: dict[str, str], what: str) -> str:
    """Mark of the line that begins with this text."""
    return next(mark for rest, mark in lines.items() if rest.startswith(what))


def test_the_command_says_the_tier_that_the_sandbox_would_find_here() -> None:
    command = [str(Path(sys.executable).parent / "tailrace"), "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = tier(asyncio.run(probe(sys.executable)))
    (line,) = [line for line in done.stdout.splitlines() if "sandbox tier" in line]
    assert line.split()[:4] == ["ok" if found == "full" else "MISSING", "sandbox", "tier", found]
    assert done.returncode == (1 if "MISSING" in done.stdout else 0), done.stdout


def test_a_machine_that_has_everything_is_exit_code_0() -> None:
    exit_code, lines = report(reporting(FULL))
    assert exit_code == 0
    assert mark_of(lines, "sandbox tier") == "ok"
    assert "MISSING" not in lines.values()


@pytest.mark.parametrize(
    ("lacking", "what", "found"),
    [
        ({"landlock_abi": 0}, "Landlock", "partial"),
        ({"seccomp": False}, "seccomp", "partial"),
        ({"landlock_abi": 0, "seccomp": False}, "seccomp", "none"),
        ({"own_user": False}, "user of tool code", "partial"),
        ({"lists_children": False}, "process list", "partial"),
    ],
)
def test_a_kernel_that_confines_less_is_named_with_a_remedy_and_exit_code_1(
    lacking: dict[str, int], what: str, found: str
) -> None:
    exit_code, lines = report(reporting(replace(FULL, **lacking)))
    assert exit_code == 1
    assert mark_of(lines, what) == "MISSING"
    assert mark_of(lines, "sandbox tier") == "MISSING"
    assert any(f"set sandbox.tier={found}" in line for line in lines)


def test_a_user_who_is_not_root_needs_no_users_of_his_own() -> None:
    assert report(reporting(replace(FULL, is_root=False, own_user=False)))[0] == 0


def test_the_interpreter_of_tool_code_is_named_with_a_note_where_it_is_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = replace(FULL, is_root=False, own_user=False)
    assert mark_of(report(reporting(own))[1], f"Python of tool code {sys.executable}") == "ok"
    monkeypatch.setattr(
        "tailrace_cli.commands.doctor.interpreter", lambda _other_user: "/usr/bin/other"
    )
    exit_code, lines = report(reporting(FULL))
    assert exit_code == 0
    (line,) = [line for line, mark in lines.items() if mark == "note" and "/usr/bin/other" in line]
    assert "sandbox.python" in line


def test_an_interpreter_that_does_not_run_is_named() -> None:
    async def find_features(_python: str) -> Features:
        raise OSError("no such interpreter")

    exit_code, lines = report(find_features)
    assert exit_code == 1
    assert any("no such interpreter" in line for line in lines)
