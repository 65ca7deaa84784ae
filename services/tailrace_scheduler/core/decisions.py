"""Decisions of the scheduler. The edge carries them out; repeating one changes nothing."""

from typing import NamedTuple

from tailrace_protos.episode import EpisodeTask, Outcome
from tailrace_protos.event import EventBody
from tailrace_protos.subjects import Phase
from tailrace_scheduler.core.streams.decisions import ProbeServer
from tailrace_scheduler.ports import GroupPlan


class AdmitGroup(NamedTuple):
    """Record this group; its members are published when they get servers."""

    plan: GroupPlan


class PublishEpisode(NamedTuple):
    """Publish an episode, with its first server."""

    task: EpisodeTask


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


class BeginGroups(NamedTuple):
    """Note the optimizer step at which each of these groups got its first server, before it starts."""

    steps: tuple[tuple[str, int], ...]  # group id and step


class DeferGroups(NamedTuple):
    """Let these groups be older than the bound: the learner does not keep places for them now."""

    steps: tuple[tuple[str, int], ...]  # group id and the step that counts as that of its first tokens


class ForgetGroup(NamedTuple):
    """Close a group that is open for the store or for us alone; `is_sent`: only we have it waiting."""

    group_id: str
    phase: Phase = "train"
    num_members: int = 0
    is_sent: bool = False


class EndTraining(NamedTuple):
    """Ask the learner of this lineage to save what it has and to take no further step."""

    lineage: str


class Emit(NamedTuple):
    """Write an event into the outbox; this scheduler writes an id once only."""

    once: str
    body: EventBody


class DrainServer(NamedTuple):
    """Ask this start of an inference server to leave."""

    server_id: str
    incarnation: str
    reason: str


StoreDecision = (
    AdmitGroup
    | PublishEpisode
    | BeginGroups
    | DeferGroups
    | SettleMembers
    | Republish
    | ForgetGroup
    | EndTraining
    | Emit
    | DrainServer
)
Decision = StoreDecision | ProbeServer
