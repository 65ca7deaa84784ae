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


def of_two(busy: dict[str, float], until_s: int, servers: ServerBook, **report: str) -> ServerBook:
    """Two servers until a time: those that are busy, at their speed, and idle ones."""
    model = EngineModel()
    begin = int(max((one.clock_s for one in servers.servers.values()), default=-1.0)) + 1
    for second in range(begin, until_s):
        for name in ("a", "b"):
            step_s = model.step_s(8, 40_000) / busy[name] if name in busy else 0.0
            told = ServerReport(
                name,
                incarnation=report.get(name, "first"),
                num_running=8 if name in busy else 0,
                kv_used_tokens=40_000 if name in busy else 0,
                step_s=step_s,
            )
            servers.report(told, float(second))
    return servers


def test_a_slow_server_that_gets_no_work_is_tried_again() -> None:
    """Else its speed is never measured again: a server that was slow once stands idle for ever."""
    servers = of_two({"a": 1.0, "b": 0.2}, 60, ServerBook(EngineModel()))
    assert servers.servers["b"].speed < 0.4
    still_slow = of_two({"a": 1.0, "b": 0.2}, 180, servers)
    assert still_slow.servers["b"].speed < 0.4
    assert of_two({"a": 1.0}, 300, servers).servers["b"].speed > 0.9


def test_a_new_process_is_as_fast_as_the_others_until_it_is_measured() -> None:
    """Engines may be far from the model: at its speed a new server would get all the work, or none."""
    servers = of_two({"a": 0.05, "b": 0.01}, 60, ServerBook(EngineModel()))
    of_two({"a": 0.05}, 63, servers, b="second")
    assert servers.servers["b"].speed == pytest.approx(1.0, rel=0.1)
