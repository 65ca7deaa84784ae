"""A real Prometheus that scrapes the services of a local run."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.world.servers import free_port

ROOT = Path(__file__).parents[2]
BINARY = shutil.which("prometheus") or shutil.which(
    "prometheus", path=str(ROOT / ".prometheus" / "usr" / "bin")
)
MISSING = "no prometheus: `make .prometheus/ready`, or install Debian's package"
_STARTS_WITHIN_S = 120.0


class Prometheus:
    """Its HTTP interface."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.began_unix_s = time.time()

    def get(self, path: str, **query: str) -> Any:
        """`data` of a reply; fails with Prometheus's reason."""
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(address, timeout=60) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from error

    def series(self, query: str) -> list[dict[str, Any]]:
        """Series of a query over the time since the start, a point each second."""
        end = time.time()
        found: list[dict[str, Any]] = self.get(
            "query_range", query=query, start=f"{self.began_unix_s}", end=f"{end}", step="1"
        )["result"]
        return found


@contextmanager
def prometheus(folder: Path, targets: Path, rules: Path) -> Iterator[Prometheus]:
    """Scrapes the targets in `targets` each second, with the rules of a file."""
    assert BINARY is not None, MISSING
    port = free_port()
    folder.mkdir()
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": "tailrace",
                "file_sd_configs": [{"files": [f"{targets}/*.json"], "refresh_interval": "1s"}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    argv = [
        BINARY,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)
    server = Prometheus(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + _STARTS_WITHIN_S
        while not _is_ready(server.url):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.05)
        yield server
    finally:
        process.terminate()
        process.wait(60)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=60) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
