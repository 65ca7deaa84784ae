"""A real weight_sync process between a real nats-server and a real Redis."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tailrace.config import Endpoints

HOST_ID = "this-host"


@dataclass
class WeightSyncProcess:
    """weight_sync, to be killed and started again on the same state."""

    run: str
    folder: Path
    env: dict[str, str]
    settings: str = ""
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        config = self.folder / "experiment.yaml"
        config.write_text(
            f"exp_name: {self.run}\nweight_sync: {{announce_interval_s: 0.2{self.settings}}}\n"
        )
        argv = [sys.executable, "-m", "tailrace_weight_sync", "--config", str(config)]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(argv, env=self.env, stdout=log, stderr=log)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        code = self.process.wait(20)
        self.process = None
        return code

    def segments(self) -> list[Path]:
        return sorted(Path("/dev/shm").glob(f"tailrace.{self.run}.*"))


@pytest.fixture
def weight_sync(endpoints: Endpoints, run_name: str, tmp_path: Path) -> Iterator[WeightSyncProcess]:
    env = {
        **os.environ,
        "TAILRACE_NATS_URL": endpoints.nats_url,
        "TAILRACE_REDIS_URL": endpoints.redis_url,
        "TAILRACE_HOST_ID": HOST_ID,
        "TAILRACE_METRICS_PORT": "0",
        "TAILRACE_STATE_DIR": str(tmp_path / "state"),
    }
    service = WeightSyncProcess(run_name, tmp_path, env)
    service.start()
    yield service
    if service.process is not None:
        service.kill()
    for path in service.segments():
        path.unlink()
