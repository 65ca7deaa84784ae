"""Servers that are alive, and those whose weights are too old."""

from __future__ import annotations

from tailrace_protos.control import ServerState
from tailrace_scheduler.core.health import ServerHealth
from tests.unit.tailrace_scheduler.simulation import made_status


def test_an_old_registry_entry_is_no_heartbeat() -> None:
    health = ServerHealth(5.0)
    health.heard(made_status("a", heartbeat_unix_s=100.0), 1000.0)
    assert not health.is_alive("a", 1000.0)
    health.heard(made_status("a", heartbeat_unix_s=100.5), 1001.0)
    assert health.is_alive("a", 1001.0)


def test_a_server_that_drains_keeps_what_it_has_and_a_silent_one_does_not() -> None:
    health = ServerHealth(5.0)
    for server_id, state in (("a", ServerState.READY), ("b", ServerState.DRAINING)):
        health.heard(made_status(server_id, heartbeat_unix_s=1.0, state=state), 1.0)
    health.heard(made_status("c", heartbeat_unix_s=1.0, state=ServerState.STARTING), 1.0)
    assert [one.server_id for one in health.alive(2.0)] == ["a"]
    assert health.present(2.0) == ["a", "b"]
    assert health.present(7.0) == []


def test_the_newest_version_of_a_suspended_or_silent_server_holds_nobody_up() -> None:
    health = ServerHealth(5.0, max_version_spread=2)
    health.heard(made_status("a", 0, 1.0), 1.0)
    health.heard(made_status("b", 10, 1.0), 1.0)
    assert [one.server_id for one in health.lagging(1.0)] == ["a"]
    assert health.lagging(1.0, suspended=["b"]) == []
    health.heard(made_status("a", 0, 9.0), 9.0)
    assert health.lagging(9.0) == []
