"""The commit that a run was started at, with what git says of changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace_cli.launch import commit_of


@pytest.mark.parametrize(
    ("status", "told"),
    [
        ("true", "0123456789ab"),
        ("echo ' M file'", "0123456789ab, with changes"),
        ("exit 1", "0123456789ab, perhaps with changes"),  # as of a disk that is too slow
    ],
)
def test_a_commit_is_called_clean_only_if_git_says_so(
    status: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = tmp_path / "git"
    git.write_text(f'#!/bin/sh\ncase "$*" in *status*) {status} ;; *) echo 0123456789ab ;; esac\n')
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert commit_of(tmp_path) == told
