"""Paths of a server's socket: in the run's folder, or in one of this user alone if that is too long."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.config import ConfigError
from tailrace_inference.adapters.listeners import socket_path


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's folder for temporary files."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_a_socket_is_in_the_state_folder_of_its_run(tmp_path: Path) -> None:
    assert socket_path("s0", tmp_path / "state") == tmp_path / "state" / "s0.sock"


def test_a_path_that_is_too_long_is_one_in_a_folder_of_this_user_alone(
    tmp_path: Path, temporary: Path
) -> None:
    long = tmp_path / ("x" * 100)
    first, again = (socket_path("s0", long) for _ in range(2))
    assert first == again
    assert first != socket_path("s1", long)
    assert first.parent.parent == temporary
    assert len(os.fsencode(first.name)) < 30
    assert first.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("taken", ["open to others", "a link", "a file", "another user's"])
def test_a_folder_that_is_not_this_users_alone_is_refused(
    taken: str, tmp_path: Path, temporary: Path
) -> None:
    folder = temporary / f"tailrace-{os.getuid()}"
    if taken == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    elif taken == "a file":
        folder.touch(mode=0o600)
    else:
        folder.mkdir(mode=0o700)
        if taken == "open to others":
            folder.chmod(0o770)
        elif os.geteuid() == 0:
            os.chown(folder, 12345, -1)
        else:
            pytest.skip("only root can make a folder of another user")
    with pytest.raises(ConfigError, match="not a folder of this user alone"):
        socket_path("s0", tmp_path / ("x" * 100))


def test_a_temporary_folder_with_a_long_name_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As batch systems give: `/scratch/<cluster>/<project>/<user>/<job>`."""
    temporary = tmp_path / ("t" * 90)
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    path = socket_path("s0", tmp_path / ("x" * 100))
    assert path.parent == Path("/tmp") / f"tailrace-{os.getuid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    path.unlink()
