"""Leases over real NATS, and reports that keep them."""

from __future__ import annotations

import asyncio

from tailrace.bus import Bus
from tailrace.channel import Address
from tailrace.policy import Stages
from tailrace.policy.leases import LeaseClient, Reporter
from tailrace_protos import subjects
from tailrace_protos.control import AgentActivity, Lease, LeaseReply, LeaseReport, LeaseRequest
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
    asked = dict(zip(requests[0].episode_ids, requests[0].predicted_tokens, strict=True))
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
        async with asyncio.timeout(10):
            activity = await activities.get()
            leases.report_call("s0", succeeded=True)
            leases.release("g0.1")
            report = await reports.get()
        reporter.cancel()
    assert (activity.worker_id, activity.num_generating) == ("w0", 3)
    assert (report.released, report.successes) == (("g0.1",), {"s0": 1})
