"""Maker of runs: the real scheduler with the fakes around it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.bus import Bus
from tailrace.config import Endpoints
from tailrace.store import StoreConnection
from tests.integration.scheduler.fakes import FakeRun

MakeRun = Callable[..., FakeRun]


@pytest.fixture
def make_run(
    endpoints: Endpoints, bus: Bus, redis: StoreConnection, tmp_path: Path, run_name: str
) -> MakeRun:
    def make(**changes: object) -> FakeRun:
        return FakeRun(endpoints, bus, redis, tmp_path, run_name, **changes)

    return make
