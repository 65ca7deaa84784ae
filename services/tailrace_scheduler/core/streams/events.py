"""Events that `StreamCore.on` takes.

Every event may come twice, late or out of order: a repeated one changes nothing, and one of an unknown
group or server is ignored. An unknown episode of an open group becomes known by the first event that
names its server (`EpisodeHeld`, `TurnAsked`), so a restarted scheduler learns what runs.

An episode id is `<group_id>.<member>`. Times are seconds of one clock that does not go back.
"""

from msgspec import Struct

from tailrace_protos.subjects import Phase


class GroupOpened(Struct, frozen=True, gc=False):
    """A group was admitted, or found open after a restart. All members that are neither settled nor
    held elsewhere wait for their start; they cost the range of their indices."""

    group_id: str
    num_members: int
    tag: str
    prompt_tokens: int  # expected context at the start of a member
    phase: Phase = "train"
    min_valid: int = 1  # members needed to train the group
    version: int = -1  # optimizer step of its oldest token; -1: nothing is sampled
    settled: tuple[int, ...] = ()
    num_valid: int = 0  # of the settled ones
    held: tuple[int, ...] = ()  # members that a worker plays already: they do not start again


class EpisodeHeld(Struct, frozen=True, gc=False):
    """A worker says that it plays this episode on this server, for example after a restart of the
    scheduler. Repeats are free."""

    episode_id: str
    server_id: str
    context_tokens: int
    in_tool: bool = False


class EpisodeEnded(Struct, frozen=True, gc=False):
    """A member ended, whatever its outcome; its place on a server becomes free."""

    episode_id: str
    is_valid: bool
    context_tokens: int = 0  # 0: the last known
    finished: bool = True  # false: cut off, so its length is only a lower bound


class EpisodeReleased(Struct, frozen=True, gc=False):
    """The worker of an episode plays no further turn: its place is free before it has ended."""

    episode_id: str


class GroupComplete(Struct, frozen=True, gc=False):
    """All members have settled, so the group is ready for the learner if `num_valid` suffices.

    `oldest_version` is the optimizer step of its oldest unmasked token (-1: as the core knows).
    """

    group_id: str
    num_valid: int
    num_bytes: int = 0
    oldest_version: int = -1


class TurnAsked(Struct, frozen=True, gc=False):
    """A worker asks for a server of the next turn. It gets a `ContinueTurn`, perhaps after `HoldTurn`.

    Workers ask after a tool call longer than `StreamCore.ask_after_s`, after a call that its server
    refused or failed (`failed`), and when they have no server. Asking again is free.
    """

    episode_id: str
    context_tokens: int
    last_server_id: str = ""
    cached_tokens: int = -1  # of its prefix at the last server; -1: unknown
    failed: bool = False


class TurnEnded(Struct, frozen=True, gc=False):
    """A turn gave its tokens; the episode's context is now `context_tokens`."""

    episode_id: str
    context_tokens: int


class ToolStarted(Struct, frozen=True, gc=False):
    """A tool call (or a step of the environment) began: nothing decodes, the prefix stays."""

    episode_id: str


class ToolEnded(Struct, frozen=True, gc=False):
    """The episode's next turn, the first one too, began at its server without asking."""

    episode_id: str
    context_tokens: int


class ServerReport(Struct, frozen=True, gc=False):
    """One report of an inference server, every one to two seconds. Counts are since its last report."""

    server_id: str
    incarnation: str = ""
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0  # 0: unknown, the calibration's
    host_kv_tokens: int = 0  # 0: prefixes are not kept in host memory
    num_running: int = 0
    num_waiting: int = 0
    step_s: float = 0.0  # mean of decode steps; 0: none ran
    num_preempted: int = 0
    recomputed_tokens: int = 0  # prefilled again: preempted, or evicted between two turns
    max_running: int = 0  # 0: unknown, the calibration's
    policy_version: int = -1  # policy version that it serves
    decode_share: float = 1.0  # share of the time in decode steps (the rest is prefill or idle)
    releases_prefixes: bool = False  # it forgets the contexts of episodes that ended


class ServerGone(Struct, frozen=True, gc=False):
    """A server is silent, dead, distrusted or another incarnation: what it held is lost there."""

    server_id: str


class ServerLeaving(Struct, frozen=True, gc=False):
    """A server announced that it leaves: it gets nothing more. Its running turns end there, by
    themselves or aborted with their tokens kept, and their episodes ask for another server."""

    server_id: str


class ServersBarred(Struct, frozen=True, gc=False):
    """These servers get nothing new for now; what they have stays. All others may get more again."""

    server_ids: frozenset[str]


class ContextLimited(Struct, frozen=True, gc=False):
    """The longest episode has this many tokens. Another limit begins the statistics of lengths anew."""

    tokens: int


class CallsReported(Struct, frozen=True, gc=False):
    """Callers saw calls (or the probe that the core asked for) end at a server."""

    server_id: str
    failures: int
    successes: int


class GroupsTaken(Struct, frozen=True, gc=False):
    """The learner took groups of `select`; they are no longer offered."""

    group_ids: tuple[str, ...]


class GroupsDropped(Struct, frozen=True, gc=False):
    """No step will train these groups: a `DropGroup` was carried out, or the learner gave them up."""

    group_ids: tuple[str, ...]


class StepDone(Struct, frozen=True, gc=False):
    """The learner finished optimizer step number `optimizer_step` (the first: 1) with what it took."""

    optimizer_step: int
    num_trained_tokens: int = 0


class AdmissionBounded(Struct, frozen=True, gc=False):
    """Bounds of admission that others set: no group is admitted for a step after `last_step`, where a
    pinned evaluation follows or a run has not begun. Credit counts from the oldest version that servers
    have, of which `newest_policy_version` is that of the learner's step."""

    last_step: int
    newest_policy_version: int = -1


Event = (
    GroupOpened
    | EpisodeHeld
    | EpisodeEnded
    | EpisodeReleased
    | GroupComplete
    | TurnAsked
    | TurnEnded
    | ToolStarted
    | ToolEnded
    | ServerReport
    | ServerGone
    | ServerLeaving
    | ServersBarred
    | ContextLimited
    | CallsReported
    | GroupsTaken
    | GroupsDropped
    | StepDone
    | AdmissionBounded
)
