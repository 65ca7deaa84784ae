"""Decisions that `StreamCore.decide` returns, each once and in the order to carry them out.

The caller carries out all of them; what a decision changed is already part of the core's state. A turn
that does not reach its server comes back as `TurnAsked` with `failed`.
"""

from msgspec import Struct


class AdmitGroups(Struct, frozen=True, gc=False):
    """Admit this many groups more: draw their tasks, record them, answer with `GroupOpened` for each.

    They count against the credit from now on. 0: `blocked_by` has changed.
    """

    num_groups: int
    blocked_by: str  # "" or the bound that withholds admission


class StartEpisode(Struct, frozen=True, gc=False):
    """Publish this episode, with its server in the task."""

    episode_id: str
    server_id: str
    room_wait_s: float = 0.0  # since its group was opened, in which no server had room


class ContinueTurn(Struct, frozen=True, gc=False):
    """Answer of `TurnAsked`: play the turn on this server (another one: prefill the whole context)."""

    episode_id: str
    server_id: str


class HoldTurn(Struct, frozen=True, gc=False):
    """First answer of `TurnAsked` where no server has room: wait; a `ContinueTurn` follows."""

    episode_id: str


class CloseGroup(Struct, frozen=True, gc=False):
    """Settle these members as cancelled: the group closes without them once the others have ended.

    A group may get several, each for other members. An `AbortEpisode` follows for each of them that a
    worker plays.
    """

    group_id: str
    members: tuple[int, ...]
    reason: str


class DropGroup(Struct, frozen=True, gc=False):
    """Give up a group (policy `drop`): nothing of it may be trained; settle its open members."""

    group_id: str
    members: tuple[int, ...]


class AbortEpisode(Struct, frozen=True, gc=False):
    """Stop this episode at once, its running turn at the engine too; keep the sampled tokens."""

    episode_id: str
    server_id: str


class ProbeServer(Struct, frozen=True, gc=False):
    """Send a small call to a suspended server and report its end as `CallsReported`."""

    server_id: str


Decision = (
    AdmitGroups
    | StartEpisode
    | ContinueTurn
    | HoldTurn
    | CloseGroup
    | DropGroup
    | AbortEpisode
    | ProbeServer
)
