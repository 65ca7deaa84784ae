"""Decisions of the scheduler. The edge carries them out; repeating one changes nothing."""

from typing import NamedTuple

from tailrace_protos.episode import Outcome
from tailrace_protos.event import EventBody
from tailrace_scheduler.ports import GroupPlan


class AdmitGroup(NamedTuple):
    """Record this group, then publish the episodes of its unsettled members."""

    plan: GroupPlan


class SettleMembers(NamedTuple):
    """Settle with this outcome those of `members` that have not ended."""

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
    """Write an event into the outbox; an id is written once only."""

    once: str
    body: EventBody


class DrainServer(NamedTuple):
    """Ask this start of an inference server to leave."""

    server_id: str
    incarnation: str
    reason: str


Decision = AdmitGroup | SettleMembers | Republish | Emit | DrainServer
