"""Published OpenEnv servers, started as their pages describe: uvicorn in another process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def served(app: str, folder: Path, **variables: str) -> Iterator[str]:
    """Address of `uvicorn app`, started in `folder` with these environment variables."""
    with socket.create_server(("127.0.0.1", 0)) as listener, (folder / "server.log").open("w") as log:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with subprocess.Popen(
            [sys.executable, "-m", "uvicorn", app, "--fd", str(listener.fileno())],
            cwd=folder,
            env={**os.environ, **variables},
            pass_fds=[listener.fileno()],
            stdout=log,
            stderr=log,
        ) as server:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=200):  # waits until it serves
                    yield url
            finally:
                server.terminate()
