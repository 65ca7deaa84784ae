"""A server with wrong weights: no lease, told to leave, used again once it has been started anew."""

from __future__ import annotations

import asyncio
from typing import cast

from tailrace.bus import Bus, NoResponderError
from tailrace.clock import SystemClock
from tailrace.config import RunConfig
from tailrace_protos.control import DrainRequest, LeaseRequest, ServerState, ServerStatus
from tailrace_protos.event import Event, LearnerResumed, ServerQuarantined, WeightsPublished
from tailrace_scheduler.config import SchedulerConfig
from tailrace_scheduler.core.decisions import Decision, DrainServer
from tailrace_scheduler.core.health import ASK_TO_LEAVE_AGAIN_S
from tailrace_scheduler.core.scheduler import SchedulerCore
from tests.unit.tailrace_scheduler.simulation import made_status
from tests.unit.tailrace_scheduler.test_handlers import FakeWorld, made_actor, run_until

WRONG = Event("5-0", 100.0, "learner", ServerQuarantined("inference-1", "bad", 0.7, 0.1, 500, 3, 2))


def made_core() -> SchedulerCore:
    return SchedulerCore(RunConfig(exp_name="x"), SchedulerConfig(tags=("A",), eval_groups=3), 0.0)


def beat(
    core: SchedulerCore, now_s: float, incarnation: str, state: ServerState = ServerState.READY
) -> None:
    core.on_status(made_status("inference-0", 0, now_s, incarnation="good"), now_s)
    core.on_status(made_status("inference-1", 0, now_s, state, incarnation=incarnation), now_s)


def lease(core: SchedulerCore, episode: str, now_s: float) -> tuple[str, str]:
    (one,) = core.lease(LeaseRequest("w", (episode,), (10,)), now_s).leases
    return one.server_id, one.incarnation


def drains(decisions: list[Decision]) -> list[DrainServer]:
    return [one for one in decisions if isinstance(one, DrainServer)]


def test_a_wrong_server_gets_no_lease_and_loses_those_it_has() -> None:
    core = made_core()
    beat(core, 1.0, "bad")
    assert [lease(core, "1", 1.0), lease(core, "2", 1.0)] == [
        ("inference-0", "good"),
        ("inference-1", "bad"),
    ]
    core.on_event(WRONG, 1.5)
    assert lease(core, "2", 1.6) == ("inference-0", "good")
    assert {lease(core, str(number), 1.7)[0] for number in range(3, 9)} == {"inference-0"}
    assert core.status(1.7).num_servers == 1


def test_it_is_told_to_leave_now_and_then_until_it_does() -> None:
    core = made_core()
    beat(core, 1.0, "bad")
    core.on_event(WRONG, 1.0)
    (asked,) = drains(core.decide(1.1))
    assert (asked.server_id, asked.incarnation) == ("inference-1", "bad")
    assert drains(core.decide(1.2)) == []
    again_s = 1.2 + ASK_TO_LEAVE_AGAIN_S
    beat(core, again_s, "bad")
    assert len(drains(core.decide(again_s))) == 1
    beat(core, 2 * again_s, "bad", ServerState.DRAINING)
    assert drains(core.decide(2 * again_s)) == []


def test_its_next_start_serves_again() -> None:
    core = made_core()
    core.on_event(WRONG, 1.0)
    beat(core, 2.0, "fresh")
    assert drains(core.decide(2.0)) == []
    leased = {lease(core, str(number), 2.0) for number in range(4)}
    assert leased == {("inference-0", "good"), ("inference-1", "fresh")}


def test_a_scheduler_that_was_started_anew_still_knows() -> None:
    core = made_core()
    core.replay([WRONG], 0.0)
    beat(core, 2.0, "bad")
    assert len(drains(core.decide(2.0))) == 1
    assert {lease(core, str(number), 2.0)[0] for number in range(4)} == {"inference-0"}


class FakeBus:
    """Hears requests; nobody answers them."""

    def __init__(self, world: FakeWorld) -> None:
        self.world = world
        self.heard: list[tuple[str, DrainRequest]] = []

    async def request(
        self, subject: str, message: DrainRequest, reply_type: type[ServerStatus], *, timeout_s: float
    ) -> ServerStatus:
        self.heard.append((subject, message))
        self.world.did.append("asked")
        raise NoResponderError(subject)

    async def publish(self, subject: str, message: object) -> None: ...


async def test_the_request_names_the_start_that_is_meant_and_silence_stops_nothing() -> None:
    events = [
        Event("0-0", 99.0, "learner", LearnerResumed("L", 0, 0, "")),
        WRONG,
        Event("9-0", 102.0, "w", WeightsPublished(0, "L", 0, 1)),
    ]
    world = FakeWorld(*events)
    bus = FakeBus(world)
    actor = made_actor(world, bus=cast(Bus, bus))
    now_s = SystemClock().unix_s()
    for server_id, incarnation in (("inference-0", "good"), ("inference-1", "bad")):
        await actor.on_status(made_status(server_id, 0, now_s, incarnation=incarnation))
    await run_until(actor, world, "asked", "relay", "tick", "carry_out")
    assert bus.heard[0][0] == "x.inference.inference-1.control"
    assert bus.heard[0][1].incarnation == "bad"
    carrying = asyncio.create_task(actor.carry_out())
    async with asyncio.timeout(120):
        while not world.recorded:  # the lane goes on
            await asyncio.sleep(0.001)
    carrying.cancel()
    await asyncio.gather(carrying, return_exceptions=True)
