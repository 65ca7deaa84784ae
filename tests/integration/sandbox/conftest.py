"""A sandbox for the whole session, and things outside it that are worth stealing or breaking."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ESCAPE_ATTEMPT
from tests.integration.sandbox.box import Box

pytest.register_assert_rewrite("tests.integration.sandbox.contract")

_SUITE = re.compile("test_(escapes|abuses)")
SECRET = "tailrace-secret-4711"


@pytest.fixture(autouse=True)
def _has_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what a service process has in its environment, and no test of another folder has."""
    monkeypatch.setenv("TAILRACE_NATS_PASSWORD", SECRET)


@pytest.fixture(scope="session")
def box() -> Iterator[Box]:
    made = Box()
    yield made
    made.close()


@dataclass(frozen=True)
class Outside:
    """The world around the sandbox. All of it is open to every user of the machine."""

    folder: Path
    secret: Path
    victim: subprocess.Popen[bytes]
    fd: int

    def fill(self, code: str) -> str:
        """Put the world's names into an attempt."""
        names = {
            "$SECRET": str(self.secret),
            "$FOLDER": str(self.folder),
            "$VICTIM": str(self.victim.pid),
            "$SERVICE": str(os.getpid()),
            "$FD": str(self.fd),
        }
        for name, value in names.items():
            code = code.replace(name, value)
        return code


@pytest.fixture(autouse=True)
def counted(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Each test of the escape suite that asks the sandbox for something is an attempt."""
    if _SUITE.search(request.node.nodeid) and {"box", "default_box"} & {*request.fixturenames}:
        record_property(*ESCAPE_ATTEMPT)


@pytest.fixture(scope="session")
def outside() -> Iterator[Outside]:
    with tempfile.TemporaryDirectory(prefix="outside-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        secret = folder / "secret"
        secret.write_text(SECRET)
        secret.chmod(0o666)
        fd = os.open(secret, os.O_RDONLY)
        os.set_inheritable(fd, True)
        # A neighbour of the same user, in nobody's sandbox, that dies of the mildest signal.
        victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        yield Outside(folder, secret, victim, fd)
        victim.kill()
        victim.wait()
        os.close(fd)
