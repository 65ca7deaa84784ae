"""Groups and episodes of the core: the state, and the events of groups."""

from collections.abc import Callable, Mapping

from tailrace_scheduler.core.streams import events as ev
from tailrace_scheduler.core.streams import ledger
from tailrace_scheduler.core.streams.ages import Ages
from tailrace_scheduler.core.streams.closing import CloseRule
from tailrace_scheduler.core.streams.credit import StalenessCredit
from tailrace_scheduler.core.streams.lengths import TagLengths
from tailrace_scheduler.core.streams.placement import KvPlacement, PlacementRule
from tailrace_scheduler.core.streams.records import StreamEpisode, StreamGroup, StreamServer
from tailrace_scheduler.core.streams.servers import ServerBook
from tailrace_scheduler.core.streams.settings import StreamSettings
from tailrace_scheduler.core.streams.starts import RoomWait, StartQueue

REMEMBERED_GROUPS = 10_000


class GroupEvents:
    """State of the core; the methods take the events of groups."""

    def __init__(
        self,
        settings: StreamSettings,
        placement: Callable[[Mapping[str, StreamServer]], PlacementRule] | None,
    ) -> None:
        self._settings = settings
        self.servers = ServerBook(settings.engine)
        self.placement: PlacementRule = (placement or KvPlacement)(self.servers.servers)
        self.credit = StalenessCredit(settings)
        self.ages = Ages(settings)
        self.closing = CloseRule(settings, self.ages)
        self.queue = StartQueue()
        self.room_wait = RoomWait()
        self.is_queue_waiting = False
        self.barred: frozenset[str] = frozenset()  # servers that get nothing new
        self.groups: dict[str, StreamGroup] = {}
        self.episodes: dict[str, StreamEpisode] = {}
        self.in_tools: dict[str, StreamEpisode] = {}  # the longest wait first
        self.taken: dict[str, StreamGroup] = {}  # by the learner, not trained
        self.answers: list[tuple[str, str]] = []  # turns that stay: episode id, server id
        self.new_holds: list[StreamEpisode] = []
        self._lengths: dict[str, TagLengths] = {}
        self._num_groups = 0
        self._gone: dict[str, None] = {}  # the last groups that ended: late news of them is void

    def lengths_of(self, tag: str) -> TagLengths:
        """Return the statistics of a tag."""
        found = self._lengths.get(tag)
        if found is None:
            found = self._lengths[tag] = TagLengths(self._settings.context_limit)
        return found

    def prompt_of(self, group: StreamGroup) -> float:
        """Return the expected context at the start of a member."""
        return self.lengths_of(group.tag).prompt_tokens or float(group.prompt_tokens)

    def group_opened(self, event: ev.GroupOpened, now_s: float) -> None:
        """Take a group; a known one stays as it is."""
        if event.group_id in self.groups or event.group_id in self._gone:
            return
        group = StreamGroup(
            event.group_id,
            self._num_groups,
            event.tag,
            event.prompt_tokens,
            event.num_members,
            event.min_valid,
            event.phase,
            num_valid=event.num_valid,
            settled=set(event.settled),
            opened_s=self.room_wait.read_s(now_s),
        )
        self._num_groups += 1
        group.absent.update(event.held)
        self.groups[event.group_id] = group
        self.credit.opened(event.group_id, event.phase, event.min_valid)
        if event.phase == "train" and event.version >= 0:
            self.ages.sampled(group, event.version)
        self.queue.add_group(group)

    def group_complete(self, event: ev.GroupComplete, now_s: float) -> None:
        """All members settled: the group waits for the learner, or is of no use."""
        self.credit.complete(event.group_id, event.num_valid, event.num_bytes)
        group = self.groups.get(event.group_id)
        if group is None or group.state != "open":
            return
        for member in list(group.live):
            self._end(group.episode_id(member), group, member)
        if group.phase != "train" or event.num_valid < group.min_valid:
            self.ages.forget(group)
            self._delete(event.group_id)
            return
        group.state, group.num_valid = "ready", event.num_valid
        if event.oldest_version >= 0:
            self.ages.sampled(group, event.oldest_version)
        self.ages.ready(group)

    def drop(self, group: StreamGroup) -> None:
        """Forget a group that may not be trained."""
        for member in list(group.live):
            self._end(group.episode_id(member), group, member, forget=False)
        self.ages.forget(group)
        group.cut.update(range(group.num_members))
        self._delete(group.group_id)

    def groups_taken(self, event: ev.GroupsTaken, now_s: float) -> None:
        """The learner has them."""
        self.credit.taken(event.group_ids)
        for group_id in event.group_ids:
            group = self.groups.get(group_id)
            if group is not None and group.state == "ready":
                group.state = "taken"
                self.ages.forget(group)
                self.taken[group_id] = group
        self.ages.blocked_slots = 0

    def groups_dropped(self, event: ev.GroupsDropped, now_s: float) -> None:
        """Forget them."""
        self.credit.dropped(event.group_ids)
        for group_id in event.group_ids:
            group = self.groups.get(group_id)
            if group is not None and group.state == "ready":
                self.drop(group)

    def step_done(self, event: ev.StepDone, now_s: float) -> None:
        """The groups that the learner took are trained."""
        if event.optimizer_step <= self.ages.step:
            return
        self.credit.stepped(event.optimizer_step)
        for group_id in self.taken:
            self._delete(group_id)
        self.taken.clear()
        self.ages.next_step(event.optimizer_step, now_s)
        self.closing.next_step(event.num_trained_tokens)

    def admission_bounded(self, event: ev.AdmissionBounded, now_s: float) -> None:
        """Set bounds of admission."""
        self.credit.bounded(event)

    def _delete(self, group_id: str) -> None:
        del self.groups[group_id]
        self._gone[group_id] = None
        if len(self._gone) > REMEMBERED_GROUPS:
            del self._gone[next(iter(self._gone))]

    # Shared with the events of episodes.

    def _leave(self, episode: StreamEpisode) -> None:
        server = episode.server
        if server is not None:
            ledger.uncount(episode, server)
            server.episodes.pop(episode.episode_id, None)
            episode.server = None
            self.placement.touched(server)

    def _end(
        self, episode_id: str, group: StreamGroup, member: int, forget: bool = True
    ) -> StreamEpisode | None:
        episode = self.episodes.pop(episode_id, None)
        if episode is not None:
            self._leave(episode)
            episode.state = "running"  # no longer held: its place in the queue is dead
            episode.ticket = -1
            self.in_tools.pop(episode_id, None)
            if forget:
                group.live.pop(member, None)
        return episode

    def _member(self, episode_id: str) -> tuple[StreamGroup | None, int]:
        group_id, _, member = episode_id.rpartition(".")
        group = self.groups.get(group_id)
        if group is None or not member.isdecimal() or int(member) >= group.num_members:
            return None, -1
        return group, int(member)
