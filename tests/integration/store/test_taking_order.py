"""One rule, two places: the learner's taking in Redis and the simulated scheduler's give one order."""

from __future__ import annotations

import random

import pytest

from tailrace.store import TrajectoryBuffer
from tailrace_scheduler.core.streams import events as ev
from tailrace_scheduler.core.streams.core import StreamCore
from tailrace_scheduler.core.streams.settings import StalePolicy, StreamSettings
from tests.integration.store.made import group, trajectory

GROUPS_PER_STEP = 4
NUM_EVENTS = 300


class BothPlaces:
    """A run whose groups are told to Redis and to `StreamCore`; `take` asks both."""

    def __init__(self, buffer: TrajectoryBuffer, policy: StalePolicy, max_staleness: int) -> None:
        self.buffer = buffer
        self.max_staleness = max_staleness
        settings = StreamSettings(
            max_staleness=max_staleness, groups_per_step=GROUPS_PER_STEP, policy=policy
        )
        self.core = StreamCore(settings)
        self.core.on(ev.ServerReport("s", kv_capacity_tokens=10_000, max_running=64), 0.0)
        self.step, self.places, self.num_opened = 0, GROUPS_PER_STEP, 0
        self.untouched: list[int] = []  # open groups without a first token
        self.begun: dict[int, int] = {}  # open groups with the step of their first token
        self.closed: dict[int, int] = {}
        self.taken: list[int] = []
        self.num_kept = 0  # takings that left a closed group for an open one

    async def open(self) -> None:
        index, self.num_opened = self.num_opened, self.num_opened + 1
        await self.buffer.record_group(group(index, members=1, min_valid=1))
        self.core.on(ev.GroupOpened(f"train-{index}", 1, "e", 10, held=(0,)), 0.0)
        self.untouched.append(index)

    async def begin(self, draw: random.Random) -> None:
        index = self.untouched.pop(draw.randrange(len(self.untouched)))
        await self.buffer.begin_groups({f"train-{index}": self.step})
        self.core.on(ev.EpisodeHeld(f"train-{index}.0", "s", 10), 0.0)
        self.begun[index] = self.step

    async def close(self, index: int) -> None:
        await self.buffer.put_trajectory(trajectory(group(index, members=1, min_valid=1), 0))
        self.core.on(ev.GroupComplete(f"train-{index}", 1), 0.0)
        self.closed[index] = self.begun.pop(index)

    async def defer(self, index: int) -> None:
        later = self.step - self.max_staleness + 1
        await self.buffer.begin_groups({f"train-{index}": later}, defer=True)
        ages = self.core.book.ages
        ages.sampled(self.core.book.groups[f"train-{index}"], later)
        self.begun[index] = later

    async def take(self) -> tuple[list[str], list[str]]:
        """Return what Redis gives and what the core selects, for all places of the step."""
        old_step = self.step - self.max_staleness
        selected = self.core.select(0.0, self.places)
        given = await self.buffer.next_groups(self.places, 0, old_step=old_step)
        ids = [one.group.group_id for one in given]
        self.core.on(ev.GroupsTaken(tuple(ids)), 0.0)
        for one in given:
            del self.closed[one.group.group_index]
        self.taken += [one.group.group_index for one in given]
        self.places -= len(ids)
        self.num_kept += bool(self.closed and self.places)
        if not self.places:
            self.step, self.places = self.step + 1, GROUPS_PER_STEP
            self.core.on(ev.StepDone(self.step), 0.0)
        return ids, selected

    @property
    def old(self) -> list[int]:
        """Open groups that this step is the last to train."""
        return [index for index, step in self.begun.items() if step <= self.step - self.max_staleness]


@pytest.mark.parametrize(
    ("policy", "max_staleness"), [("wait", 1), ("close", 2), ("auto", 3), ("auto", 1)]
)
async def test_redis_gives_groups_in_the_order_of_the_simulated_rule(
    buffer: TrajectoryBuffer, policy: StalePolicy, max_staleness: int
) -> None:
    draw = random.Random(f"{policy}{max_staleness}")
    both = BothPlaces(buffer, policy, max_staleness)
    for _ in range(NUM_EVENTS):
        kind = draw.choices(("open", "begin", "close", "defer", "take"), (6, 6, 5, 0.5, 3))[0]
        if kind == "open" and len(both.untouched) + len(both.begun) < 16:
            await both.open()
        elif kind == "begin" and both.untouched:
            await both.begin(draw)
        elif kind == "close" and both.begun:
            late = int(len(both.begun) * draw.random() ** 0.3)  # the old ones stay open longest
            await both.close(list(both.begun)[late])
        elif kind == "defer" and both.old:
            await both.defer(draw.choice(both.old))
        elif kind == "take":
            given, selected = await both.take()
            assert given == selected, f"step {both.step}, places {both.places}"
    assert both.step > max_staleness, "groups grew old"
    assert both.num_kept, "places were kept for old groups"
    assert both.taken != sorted(both.taken), "age and admission disagreed"


async def test_an_old_group_does_not_wait_behind_a_younger_one_that_was_admitted_before(
    buffer: TrajectoryBuffer,
) -> None:
    for index in (0, 1, 2):
        await buffer.record_group(group(index, members=1, min_valid=1))
    await buffer.begin_groups({"train-1": 0, "train-2": 0})
    await buffer.begin_groups({"train-0": 1})
    for index in (0, 1):
        await buffer.put_trajectory(trajectory(group(index, members=1, min_valid=1), 0))
    taken = await buffer.next_groups(1, 0, old_step=0)
    assert [one.group.group_index for one in taken] == [1], "the place is kept for 2, or old ones"
