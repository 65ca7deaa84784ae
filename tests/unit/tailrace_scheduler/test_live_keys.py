"""Keys of the section `scheduler` that nothing else changes in a whole core."""

from __future__ import annotations

import pytest

from tailrace_protos.control import LeaseRequest
from tailrace_protos.episode import Outcome
from tailrace_protos.event import EpisodeRedelivered
from tailrace_scheduler.core.decisions import Republish, SettleMembers
from tests.unit.tailrace_scheduler.simulation import made_status
from tests.unit.tailrace_scheduler.test_core_promises import made_run


@pytest.mark.parametrize("max_attempts", [1, 4])
def test_an_episode_that_is_lost_goes_out_so_often(max_attempts: int) -> None:
    world = made_run(0, max_staleness=1, max_attempts=max_attempts)
    world.resume(0)
    world.served_version = world.policy_version
    world.beat()
    world.decide()
    group_id, group = next(iter(world.open.items()))
    times = 1
    while True:
        decided = world.core.reconcile(group.plan.phase, set())
        of_first = [one for one in decided if first_of(one, group_id)]
        if not of_first:
            continue  # missing for the first time
        if isinstance(of_first[0], SettleMembers):
            break
        world.happen(EpisodeRedelivered(f"{group_id}.0", times, "lost"))
        times += 1
    assert times == max_attempts
    assert of_first[0].outcome is Outcome.INFRA_FAILURE


def first_of(decision: object, group_id: str) -> bool:
    """Returns whether it is about the first member of this group."""
    if isinstance(decision, Republish):
        return (decision.plan.group_id, decision.member) == (group_id, 0)
    assert isinstance(decision, SettleMembers)
    return (decision.group_id, decision.members) == (group_id, (0,))


@pytest.mark.parametrize(
    ("max_version_spread", "max_staleness", "is_held_back"),
    [(0, 2, True), (3, 2, False), (0, 3, False), (1, 5, True)],
)
def test_a_server_three_versions_behind_gets_episodes_within_the_bound_alone(
    max_version_spread: int, max_staleness: int, is_held_back: bool
) -> None:
    core = made_run(0, max_staleness, max_version_spread=max_version_spread).core
    core.on_status(made_status("old", 4), 0.0)
    core.on_status(made_status("new", 7), 0.0)
    core.decide(0.0)
    leased = [
        lease.server_id
        for member in range(4)
        for lease in core.lease(LeaseRequest("w", (f"g.{member}",), (100,)), 0.0).leases
    ]
    assert ("old" not in leased) is is_held_back
    assert core.lagging(0.0) == ({"old": 4} if is_held_back else {})
