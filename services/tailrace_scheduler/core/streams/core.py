"""`StreamCore`: the scheduler as a state machine; the other modules of this room are its parts.

Invariants: admission never exceeds the credit; each member is told to end early at most once; the KV
ledger equals a recount of the live episodes; a group whose age exceeds the staleness bound is offered
only where its old tokens are masked; every waiting episode starts while servers have room.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from tailrace_protos.subjects import Phase
from tailrace_scheduler.core.streams import events as ev
from tailrace_scheduler.core.streams import ledger
from tailrace_scheduler.core.streams.book import EpisodeBook
from tailrace_scheduler.core.streams.closing import CHECK_S
from tailrace_scheduler.core.streams.decisions import (
    AbortEpisode,
    AdmitGroups,
    CloseGroup,
    ContinueTurn,
    Decision,
    DropGroup,
    HoldTurn,
    ProbeServer,
    StartEpisode,
)
from tailrace_scheduler.core.streams.placement import PlacementRule
from tailrace_scheduler.core.streams.records import StreamEpisode, StreamGroup, StreamServer
from tailrace_scheduler.core.streams.settings import StreamSettings
from tailrace_scheduler.core.streams.starts import next_member

SWEEP_S = 5.0  # between two looks at long tool calls
UNBOUNDED: Mapping[Phase, int] = MappingProxyType({})


class StreamCore:
    """Takes events and the time, returns decisions.

    Call `on` for every event, then `decide` (one `decide` may follow many `on`). Call `decide` also at
    `wake_s`, for rules that act on time alone. After a restart: tell the servers, `StepDone`, then
    every open group as `GroupOpened` (with `settled`, `held`, `version`), closed ones by `GroupOpened`
    and `GroupComplete`, and held leases by `EpisodeHeld`; call `decide` when all is told.
    """

    def __init__(
        self,
        settings: StreamSettings,
        placement: Callable[[Mapping[str, StreamServer]], PlacementRule] | None = None,
    ) -> None:
        self._settings = settings
        self.book = EpisodeBook(settings, placement)
        self._swept_s = -math.inf
        self._on: dict[type, Callable[[Any, float], None]] = {
            ev.TurnEnded: self.book.turn_ended,
            ev.ToolStarted: self.book.tool_started,
            ev.ToolEnded: self.book.tool_ended,
            ev.TurnAsked: self.book.turn_asked,
            ev.EpisodeEnded: self.book.episode_ended,
            ev.EpisodeReleased: self.book.episode_released,
            ev.EpisodeHeld: self.book.episode_held,
            ev.GroupOpened: self.book.group_opened,
            ev.GroupComplete: self.book.group_complete,
            ev.GroupsTaken: self.book.groups_taken,
            ev.GroupsDropped: self.book.groups_dropped,
            ev.StepDone: self.book.step_done,
            ev.AdmissionBounded: self.book.admission_bounded,
            ev.ServerReport: self.book.server_report,
            ev.ServerGone: self.book.server_gone,
            ev.ServerLeaving: self.book.server_leaving,
            ev.ServersBarred: self.book.servers_barred,
            ev.ContextLimited: self.book.context_limited,
            ev.CallsReported: self.book.calls_reported,
        }

    def on(self, event: ev.Event, now_s: float) -> None:
        """Take one event."""
        self._on[type(event)](event, now_s)

    def decide(self, now_s: float, rooms: Mapping[Phase, int] = UNBOUNDED) -> list[Decision]:
        """Return what is to be done now, in order. An empty list costs next to nothing.

        `rooms`: episodes of a phase that may start in this call; a phase not named has no bound.
        """
        decided: list[Decision] = []
        self._by_age(decided, now_s)
        self._answer(decided)
        self._place(decided, now_s, dict(rooms))
        if now_s - self._swept_s >= SWEEP_S:
            self._swept_s = now_s
            self._sweep(now_s)
        decided += [ProbeServer(one) for one in self.book.servers.to_probe(now_s)]
        if (admission := self.admit()) is not None:
            decided.append(admission)
        return decided

    def admit(self) -> AdmitGroups | None:
        """Return the part of `decide` that admits groups, which may come first: they start with the
        next `decide`."""
        return self.book.credit.admit(self.book.servers.servers.values())

    def select(self, now_s: float, slots_left: int) -> list[str]:
        """Return closed groups that the learner may take for the current step, in order, at most
        `slots_left`. The caller confirms with `GroupsTaken` the ones that it took."""
        return [group.group_id for group in self.book.ages.select(slots_left)]

    def wake_s(self, now_s: float) -> float:
        """Return the time at which `decide` must be called again without an event."""
        wakes_s = min(self._swept_s + SWEEP_S, self.book.servers.next_probe_s())
        if self.book.ages.blocked_slots:
            wakes_s = min(wakes_s, self.book.closing.checked_s + CHECK_S)
        return max(wakes_s, now_s + 1e-3)

    @property
    def ask_after_s(self) -> float:
        """Return the length of a tool call after which a worker must ask for its server."""
        return self.book.placement.ask_after_s

    def _by_age(self, decided: list[Decision], now_s: float) -> None:
        ages, closing, book = self.book.ages, self.book.closing, self.book
        if self._settings.policy == "drop":
            for group in ages.overdue():
                decided.append(DropGroup(group.group_id, group.unsettled))
                self._abort(decided, group.live.values())
                book.drop(group)
        if now_s - closing.checked_s < CHECK_S:
            return
        rate = book.servers.lost_rate(book.is_queue_waiting)
        ends = closing.decide(now_s, rate, book.servers.mean_step_s, book.lengths_of)
        for group_id, members in ends.members.items():
            group = book.groups[group_id]
            group.cut.update(members)
            valid = f"{group.num_valid} of {group.num_members} members valid"
            reason = f"closed at the staleness horizon: {valid}"
            decided.append(CloseGroup(group_id, tuple(sorted(members)), reason))
            self._abort(decided, [group.live[one] for one in members if one in group.live])
        for group in ends.deferred.values():
            ages.sampled(group, ages.step - self._settings.max_staleness + 1)

    def _abort(self, decided: list[Decision], episodes: Iterable[StreamEpisode]) -> None:
        for episode in episodes:
            server_id = episode.server.server_id if episode.server else ""
            decided.append(AbortEpisode(episode.episode_id, server_id))

    def _answer(self, decided: list[Decision]) -> None:
        decided += [ContinueTurn(one, server_id) for one, server_id in self.book.answers]
        self.book.answers.clear()

    def _place(self, decided: list[Decision], now_s: float, rooms: dict[Phase, int]) -> None:
        book = self.book
        while (head := book.queue.head(lambda phase: rooms.get(phase, 1) > 0)) is not None:
            if isinstance(head, StreamGroup):
                if not self._start(decided, head, now_s, rooms):
                    break
            elif not self._continue(decided, head, now_s):
                break
        else:
            book.is_queue_waiting = book.queue.has_groups  # for workers
        book.room_wait.run(head is not None, now_s)
        decided += [HoldTurn(one.episode_id) for one in book.new_holds if one.state == "held"]
        book.new_holds.clear()

    def _start(
        self,
        decided: list[Decision],
        group: StreamGroup,
        now_s: float,
        rooms: dict[Phase, int],
    ) -> bool:
        book = self.book
        server = book.placement.choose(book.lengths_of(group.tag), book.prompt_of(group), "")
        book.is_queue_waiting = server is None
        if server is None:
            return False
        if group.phase in rooms:
            rooms[group.phase] -= 1
        member = next_member(group)
        group.next_member = member + 1
        episode = book.start(group, member, server, now_s)
        waited_s = book.room_wait.read_s(now_s) - group.opened_s
        decided.append(StartEpisode(episode.episode_id, server.server_id, waited_s))
        return True

    def _continue(self, decided: list[Decision], episode: StreamEpisode, now_s: float) -> bool:
        book = self.book
        server = book.placement.choose(episode.lengths, episode.context, episode.avoids)
        if server is None and episode.avoids:
            server = book.placement.choose(episode.lengths, episode.context, "")
        book.is_queue_waiting = server is None
        if server is None:
            return False
        book.resume(episode, server, now_s)
        decided.append(ContinueTurn(episode.episode_id, server.server_id))
        return True

    def _sweep(self, now_s: float) -> None:
        """Release long tool waits, refresh the statistics of lengths."""
        book = self.book
        for episode in list(book.in_tools.values()):
            waited_s = now_s - episode.since_s
            if waited_s < book.placement.ask_after_s:
                break
            server = episode.server
            if server is None or episode.bucket < 0 or not book.is_queue_waiting:
                continue
            if book.placement.releases(episode, waited_s):
                ledger.uncount(episode, server)
                book.placement.touched(server)
        book.refresh(now_s)
