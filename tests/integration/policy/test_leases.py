"""Leases over real NATS, and reports that keep them."""

from __future__ import annotations

import asyncio

from tailrace.bus import Bus
from tailrace.channel import Address
from tailrace.policy import Stages
from tailrace.policy.leases import LeaseClient, Reporter
from tailrace_protos import subjects
from tailrace_protos.control import (
    AgentActivity,
    EpisodeState,
    LeaseReply,
    LeaseReport,
    LeaseRequest,
    SchedulerBegan,
)
from tailrace_protos.episode import Lease
from tests.world.servers import ServerProcess
from tests.world.serving import make_service, serving


async def test_leases_wait_for_a_scheduler_and_for_a_healthy_server(
    nats_server: ServerProcess, run_name: str, bus: Bus
) -> None:
    requests: list[LeaseRequest] = []

    async def lease(request: LeaseRequest) -> LeaseReply:
        requests.append(request)
        if len(requests) == 1:
            return LeaseReply((), retry_after_s=0.02)
        return LeaseReply(tuple(Lease(one, "s0", "subject", "") for one in request.episode_ids))

    client = LeaseClient(bus, run_name, "w0")
    waiting = asyncio.gather(*(client.lease(f"g{n}.0", 10 + n) for n in range(3)))
    await asyncio.sleep(0.05)
    service = make_service(nats_server.url, run_name, "scheduler")
    service.endpoint(subjects.lease(run_name), LeaseRequest, lease)
    async with serving(service):
        assert await waiting == [Address("s0", "subject")] * 3
        await client.lease("g0.0", 5, failed_server_id="s0")
    asked = dict(zip(requests[0].episode_ids, requests[0].context_tokens, strict=True))
    assert asked == {"g0.0": 10, "g1.0": 11, "g2.0": 12}  # refused together, they ask together again
    assert [request.failed_server_id for request in requests] == ["", "", "s0"]


async def test_a_worker_reports_what_its_episodes_do_and_what_its_leases_came_to(
    nats_server: ServerProcess, run_name: str, bus: Bus
) -> None:
    activities: asyncio.Queue[AgentActivity] = asyncio.Queue()
    reports: asyncio.Queue[LeaseReport] = asyncio.Queue()
    service = make_service(nats_server.url, run_name, "scheduler")
    service.subscribe(subjects.activity(run_name), AgentActivity, activities.put)
    service.subscribe(subjects.lease_report(run_name), LeaseReport, reports.put)
    leases = LeaseClient(bus, run_name, "w0")
    async with serving(service):
        reporter = asyncio.create_task(
            Reporter(bus, run_name, "w0", Stages(num_generating=3), leases).run()
        )
        async with asyncio.timeout(60):
            activity = await activities.get()
            leases.report_call("s0", succeeded=True)
            leases.release("g0.1")
            report = await reports.get()
        reporter.cancel()
    assert (activity.worker_id, activity.num_generating) == ("w0", 3)
    assert (report.released, report.successes) == (("g0.1",), {"s0": 1})


async def test_who_gets_no_room_asks_again_while_the_others_go_on(
    nats_server: ServerProcess, run_name: str, bus: Bus
) -> None:
    requests: list[LeaseRequest] = []

    async def lease(request: LeaseRequest) -> LeaseReply:
        requests.append(request)
        held = "g1.0" if len(requests) == 1 else ""
        leases = (Lease(one, "s0", "x", "", ask_after_s=7.0) for one in request.episode_ids)
        return LeaseReply(tuple(one for one in leases if one.episode_id != held), 0.02)

    service = make_service(nats_server.url, run_name, "scheduler")
    service.endpoint(subjects.lease(run_name), LeaseRequest, lease)
    client = LeaseClient(bus, run_name, "w0")
    async with serving(service):
        asking = [client.lease(f"g{n}.0", 100 + n) for n in range(3)]
        assert await asyncio.gather(*asking) == [Address("s0", "x")] * 3
    assert [sorted(request.episode_ids) for request in requests] == [["g0.0", "g1.0", "g2.0"], ["g1.0"]]
    assert requests[1].context_tokens == (101,)
    assert client.ask_after_s == 7.0


async def test_a_new_scheduler_is_told_every_episode_again_and_only_the_newest_state(
    nats_server: ServerProcess, run_name: str, bus: Bus
) -> None:
    reports: asyncio.Queue[LeaseReport] = asyncio.Queue()
    service = make_service(nats_server.url, run_name, "scheduler")
    service.subscribe(subjects.lease_report(run_name), LeaseReport, reports.put)
    client = LeaseClient(bus, run_name, "w0")
    async with serving(service), asyncio.timeout(60):
        for n in range(3):
            client.take(Lease(f"g{n}.0", "s0", "x", ""))
        client.report_turn("g0.0", "s0", 40, is_over=False)
        client.report_turn("g0.0", "s0", 55, is_over=True)
        await client.report()
        told = {EpisodeState("g0.0", "s0", 55, True)}
        told |= {EpisodeState(f"g{n}.0", "s0", 0, True) for n in (1, 2)}
        assert set((await reports.get()).states) == told
        client.release("g2.0")
        await client.report()
        assert (await reports.get()).states == ()
        await client.on_scheduler_began(SchedulerBegan("second"))
        await client.report()
        assert {state.episode_id for state in (await reports.get()).states} == {"g0.0", "g1.0"}
