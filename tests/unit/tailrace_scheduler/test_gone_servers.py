"""Servers that are gone: their history is kept for a time, then nothing is left of them."""

from __future__ import annotations

import msgspec

from tailrace.config import RunConfig
from tailrace_protos.control import LeaseRequest
from tailrace_scheduler.config import SchedulerConfig
from tailrace_scheduler.core.flow import EpisodeFlow
from tailrace_scheduler.core.streams import events as ev
from tailrace_scheduler.core.streams.core import StreamCore
from tailrace_scheduler.core.streams.decisions import Decision, ProbeServer, StartEpisode
from tailrace_scheduler.core.streams.settings import StreamSettings
from tests.unit.tailrace_scheduler.simulation import made_status

LATER_S = 700.0


def made_core(*server_ids: str) -> StreamCore:
    core = StreamCore(StreamSettings(max_staleness=1, groups_per_step=4))
    for server_id in server_ids:
        core.on(ev.ServerReport(server_id, policy_version=0), 0.0)
    return core


def of_kind(decided: list[Decision], kind: type) -> list[Decision]:
    return [one for one in decided if isinstance(one, kind)]


def test_nobody_wakes_up_for_the_probe_of_a_suspended_server_that_is_gone() -> None:
    core = made_core("a", "b")
    core.on(ev.CallsReported("a", 5, 0), 0.0)
    core.on(ev.ServerGone("a"), 1.0)
    now_s = 20.0
    assert of_kind(core.decide(now_s), ProbeServer) == []
    assert core.wake_s(now_s) - now_s > 1.0
    core.on(ev.ServerReport("a", policy_version=0), now_s)
    assert core.wake_s(now_s) - now_s < 0.1
    assert of_kind(core.decide(now_s), ProbeServer) == [ProbeServer("a")]


def test_a_server_that_comes_back_soon_has_its_history() -> None:
    core = made_core("a", "b")
    core.on(ev.CallsReported("a", 5, 0), 0.0)
    core.on(ev.ServerGone("a"), 1.0)
    core.on(ev.ServerReport("new", policy_version=0), 60.0)
    core.on(ev.ServerReport("a", policy_version=0), 60.0)
    assert core.book.servers.servers["a"].calls.on_probation


def test_a_server_that_is_gone_for_long_is_forgotten_once_it_holds_nothing() -> None:
    core = made_core("a", "b", "c")
    core.on(ev.CallsReported("a", 5, 0), 0.0)
    core.on(ev.CallsReported("c", 5, 0), 0.0)
    core.on(ev.GroupOpened("g", 1, "task", prompt_tokens=100), 1.0)
    (start,) = of_kind(core.decide(1.0), StartEpisode)
    assert start == StartEpisode("g.0", "b")
    for server_id in ("a", "b"):
        core.on(ev.ServerGone(server_id), 2.0)
    core.on(ev.EpisodeHeld("g.0", "b", 100), 2.0)  # its worker does not know yet
    core.on(ev.ServerReport("new", policy_version=0), LATER_S)
    assert sorted(core.book.servers.servers) == ["b", "c", "new"]
    assert of_kind(core.decide(LATER_S), ProbeServer) == [ProbeServer("c")]
    core.on(ev.EpisodeEnded("g.0", True, 100), LATER_S)
    core.on(ev.CallsReported("a", 1, 0), LATER_S)  # late news
    core.on(ev.ServerReport("newer", policy_version=0), LATER_S)
    assert sorted(core.book.servers.servers) == ["c", "new", "newer"]


def test_a_run_whose_every_server_has_another_name_holds_only_those_of_late() -> None:
    run = msgspec.convert({"exp_name": "x"}, RunConfig)
    flow = EpisodeFlow(run, SchedulerConfig(tags=("A",)))
    for number in range(100):
        now_s = 1000.0 + LATER_S * number
        flow.on_status(made_status(f"pod-{number}", heartbeat_unix_s=now_s), now_s)
        (lease,) = flow.lease(LeaseRequest("w", ("outside",), (10,)), now_s).leases
        assert lease.server_id == f"pod-{number}"
    assert list(flow.health.statuses) == ["pod-99"]
    assert len(flow.feed._core.book.servers.servers) <= 2
    assert list(flow.feed._last_given) == ["pod-99"]
