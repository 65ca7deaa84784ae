"""Prices of work follow the measured speed of the engines, whatever the engine model assumes."""

import pytest

from tailrace_scheduler.core.streams.events import ServerReport
from tailrace_scheduler.core.streams.servers import ServerBook
from tailrace_scheduler.core.streams.settings import EngineModel


def lost_rate(speed: float) -> float:
    """Engine seconds lost by two servers of this speed, of which one runs empty."""
    model, servers = EngineModel(), ServerBook(EngineModel())
    for second in range(60):
        step_s = model.step_s(8, 40_000) / speed
        for name in ("a", "b"):
            busy = ServerReport(name, num_running=8, kv_used_tokens=40_000, step_s=step_s)
            servers.report(busy, float(second))
    servers.lost_rate(is_queue_waiting=True)
    servers.report(ServerReport("b", num_running=0), 60.0)
    return servers.lost_rate(is_queue_waiting=False)


def test_servers_that_are_faster_than_the_model_lose_more_of_its_seconds() -> None:
    assert lost_rate(1.0) > 0
    assert lost_rate(8.0) == pytest.approx(8 * lost_rate(1.0), rel=0.02)
