"""What the scheduler decides: each is carried out by the edge, may be repeated, and has one meaning."""

from __future__ import annotations

from typing import NamedTuple

from tailrace_protos.episode import Outcome
from tailrace_protos.event import EventBody
from tailrace_scheduler.ports import GroupPlan


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


class DrainServer(NamedTuple):
    """Ask this start of an inference server to leave."""

    server_id: str
    incarnation: str
    reason: str


Decision = AdmitGroup | SettleMembers | Republish | Emit | DrainServer
