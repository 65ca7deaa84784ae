"""A real weight_sync process between a real nats-server and a real Redis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tailrace.config import Endpoints
from tests.world.processes import ServiceProcess, environment

HOST_ID = "this-host"


@dataclass
class WeightSyncProcess(ServiceProcess):
    """weight_sync with short intervals."""

    run: str = ""

    def configure(self, settings: str = "") -> None:
        """Write the experiment file, with more settings in the section."""
        section = f"{{announce_interval_s: 0.2{settings}}}"
        self.config.write_text(f"exp_name: {self.run}\nweight_sync: {section}\n")

    def segments(self) -> list[Path]:
        return sorted(Path("/dev/shm").glob(f"tailrace.{self.run}.*"))


@pytest.fixture
def weight_sync(endpoints: Endpoints, run_name: str, tmp_path: Path) -> Iterator[WeightSyncProcess]:
    service = WeightSyncProcess(
        "weight_sync",
        tmp_path / "experiment.yaml",
        environment(endpoints, tmp_path),
        tmp_path / "log",
        run=run_name,
    )
    service.configure()
    service.start()
    yield service
    service.kill()
    for path in service.segments():
        path.unlink()
