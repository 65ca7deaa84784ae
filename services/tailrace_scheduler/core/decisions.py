"""What the scheduler decides: each is carried out by the edge, may be repeated, and has one meaning."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tailrace_protos.episode import EnvTask, Outcome
from tailrace_protos.event import EventBody
from tailrace_protos.subjects import Phase


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A group of episodes to be recorded and then published."""

    group_id: str
    group_index: int  # place in the data order of its phase
    phase: Phase
    tasks: tuple[EnvTask, ...]  # one per member
    deadline_unix_s: float
    min_valid: int
    step: int  # optimizer step at admission
    attempts: tuple[int, ...] = ()  # current attempt of each member; empty: all 0
    settled: dict[int, Outcome] = {}  # member -> outcome

    def attempt(self, member: int) -> int:
        """Number of the attempt that is out now."""
        return self.attempts[member] if self.attempts else 0

    @property
    def unsettled(self) -> tuple[int, ...]:
        """Members that have not ended."""
        return tuple(member for member in range(len(self.tasks)) if member not in self.settled)


class AdmitGroup(NamedTuple):
    """Record this group, then publish the episodes of its unsettled members."""

    plan: GroupPlan


class SettleMembers(NamedTuple):
    """Settle those of `members` that have not ended by themselves, with this outcome."""

    group_id: str
    members: tuple[int, ...]
    outcome: Outcome
    reason: str


class Republish(NamedTuple):
    """Give the member its next attempt and publish it."""

    plan: GroupPlan
    member: int
    reason: str


class Emit(NamedTuple):
    """Write an event into the outbox, once for ever under this id."""

    once: str
    body: EventBody


Decision = AdmitGroup | SettleMembers | Republish | Emit
