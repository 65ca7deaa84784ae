"""Effect of every event of episodes and servers on the state."""

import math

import numpy as np
from msgspec.structs import replace

from tailrace_scheduler.core.streams import events as ev
from tailrace_scheduler.core.streams import ledger
from tailrace_scheduler.core.streams.group_events import GroupEvents
from tailrace_scheduler.core.streams.lengths import NUM_BUCKETS
from tailrace_scheduler.core.streams.records import StreamEpisode, StreamGroup, StreamServer

ADVANCE_S = 4.0  # between two looks at how far the running turns of a server are


class EpisodeBook(GroupEvents):
    """The whole state of the core; its methods take the events."""

    def start(
        self, group: StreamGroup, member: int, server: StreamServer, now_s: float
    ) -> StreamEpisode:
        """Give a member its place on a server."""
        episode = self._create(group, member, self.credit.served_step(server))
        episode.context = episode.prefilled = episode.prompt = self.prompt_of(group)
        episode.started_s = now_s
        self._settle_on(episode, server, now_s)
        return episode

    def resume(self, episode: StreamEpisode, server: StreamServer, now_s: float) -> None:
        """Give a held turn its place on a server."""
        self._settle_on(episode, server, now_s)

    def _create(self, group: StreamGroup, member: int, served_step: int) -> StreamEpisode:
        episode_id = group.episode_id(member)
        episode = StreamEpisode(episode_id, group, member, self.lengths_of(group.tag))
        group.live[member] = self.episodes[episode_id] = episode
        group.absent.discard(member)
        if group.phase == "train" and group.version < 0:
            self.ages.sampled(group, served_step)
        return episode

    def _settle_on(self, episode: StreamEpisode, server: StreamServer, now_s: float) -> None:
        if episode.server is not server:
            self._leave(episode)
            episode.server = server
            server.episodes[episode.episode_id] = episode
        if episode.bucket < 0:
            ledger.count(episode, server)
            self.placement.touched(server)
        episode.state, episode.avoids = "running", ""
        episode.clock = server.tokens_at(now_s)

    def episode_ended(self, event: ev.EpisodeEnded, now_s: float) -> None:
        """Free the episode's place and learn its length."""
        group, member = self._member(event.episode_id)
        if group is None or member in group.settled:
            return
        group.settled.add(member)
        group.num_valid += event.is_valid
        group.absent.discard(member)
        episode = self._end(event.episode_id, group, member)
        if episode is not None:
            ended = max(event.context_tokens - episode.prefilled, episode.sampled)
            group.done_tokens += ended
            if event.finished and episode.started_s >= 0:
                new = event.context_tokens - episode.prompt
                episode.lengths.lived(new, now_s - episode.started_s)
        if episode is not None or event.context_tokens:
            context = event.context_tokens or (episode.context if episode else 0.0)
            self.lengths_of(group.tag).ended(int(context), event.finished)

    def episode_released(self, event: ev.EpisodeReleased, now_s: float) -> None:
        """Free the episode's place; who plays it after all asks or tells its server."""
        episode = self.episodes.get(event.episode_id)
        if episode is None or episode.server is None:
            return
        self._leave(episode)
        episode.clock = math.inf
        if self.in_tools.pop(event.episode_id, None) is not None:
            episode.state = "running"

    def episode_held(self, event: ev.EpisodeHeld, now_s: float) -> None:
        """Take over an episode that a worker plays already."""
        episode = self._known(event.episode_id)
        server = self.servers.servers.get(event.server_id)
        if episode is None or episode.server is not None or episode.state == "held":
            return
        episode.context = float(event.context_tokens)
        if server is not None:
            self._settle_on(episode, server, now_s)
        if event.in_tool:
            self._to_tool(episode, now_s)

    def turn_asked(self, event: ev.TurnAsked, now_s: float) -> None:
        """Keep the turn at its server, or let it wait for one."""
        episode = self._known(event.episode_id)
        if episode is None:
            return
        self._back(episode, float(event.context_tokens), now_s)
        server = episode.server
        if server is None and not event.failed:
            server = self._at_last(episode, event.last_server_id)
        if episode.state == "held":
            self.new_holds.append(episode)
            return
        is_refused = event.failed or not _may_serve(server)
        if not is_refused and self.placement.stays(episode, event.cached_tokens):
            assert server is not None
            self._settle_on(episode, server, now_s)
            self.answers.append((episode.episode_id, server.server_id))
            return
        episode.avoids = event.last_server_id if event.failed else ""
        self._hold(episode)
        self.new_holds.append(episode)

    def _at_last(self, episode: StreamEpisode, server_id: str) -> StreamServer | None:
        server = self.servers.servers.get(server_id)
        if server is not None and not server.gone and episode.state != "held":
            episode.server = server
            server.episodes[episode.episode_id] = episode
        return server

    def _hold(self, episode: StreamEpisode) -> None:
        self._leave(episode)
        episode.state = "held"
        self.queue.add_turn(episode)

    def turn_ended(self, event: ev.TurnEnded, now_s: float) -> None:
        """Set the context that the turn left."""
        episode = self.episodes.get(event.episode_id)
        if episode is None or episode.server is None:
            return
        episode.has_begun = True
        new = max(event.context_tokens - episode.context, 0.0)
        ledger.note_sampled(episode, new)
        ledger.grow(episode, episode.server, float(event.context_tokens))
        episode.clock = math.inf  # nothing decodes until the next turn

    def tool_started(self, event: ev.ToolStarted, now_s: float) -> None:
        """Nothing decodes from now on."""
        episode = self.episodes.get(event.episode_id)
        if episode is not None and episode.state == "running":
            self._to_tool(episode, now_s)

    def _to_tool(self, episode: StreamEpisode, now_s: float) -> None:
        episode.state, episode.since_s, episode.prefix = "tool", now_s, episode.context
        self.in_tools[episode.episode_id] = episode

    def tool_ended(self, event: ev.ToolEnded, now_s: float) -> None:
        """The next turn began at the episode's server."""
        episode = self.episodes.get(event.episode_id)
        if episode is None:
            return
        if not episode.has_begun and episode.started_s >= 0:
            self._begin(episode, event.context_tokens)
        self._back(episode, float(event.context_tokens), now_s)
        if episode.server is not None:
            self._settle_on(episode, episode.server, now_s)

    def _begin(self, episode: StreamEpisode, prompt_tokens: int) -> None:
        """Learn the prompt of an episode that has just started."""
        episode.has_begun = True
        episode.context = episode.prefilled = episode.prompt = float(prompt_tokens)
        episode.lengths.began(prompt_tokens)
        if episode.server is not None:
            ledger.grow(episode, episode.server, episode.context)

    def _back(self, episode: StreamEpisode, context: float, now_s: float) -> None:
        if episode.state == "tool":
            del self.in_tools[episode.episode_id]
            episode.lengths.waited(now_s - episode.since_s)
            episode.state = "running"
            episode.clock = math.inf
        episode.prefilled += max(context - episode.context, 0.0)
        if episode.server is not None:
            ledger.grow(episode, episode.server, context)
        episode.context = context

    def _known(self, episode_id: str) -> StreamEpisode | None:
        episode = self.episodes.get(episode_id)
        if episode is not None:
            return episode
        group, member = self._member(episode_id)
        if group is None or group.state != "open" or member in group.settled:
            return None
        return self._create(group, member, self.ages.step)

    # Servers.

    def server_report(self, event: ev.ServerReport, now_s: float) -> None:
        """Take a report; another incarnation has lost what the former one held."""
        known = self.servers.servers.get(event.server_id)
        if known is not None and not known.gone and known.incarnation != event.incarnation:
            self._lose(known)
        if known is None or known.gone or known.policy_version != event.policy_version:
            self.credit.is_changed = True
        server = self.servers.report(event, now_s)
        server.barred = server.server_id in self.barred
        if now_s - server.advanced_s >= ADVANCE_S:
            server.advanced_s = now_s
            ledger.advance(server, self._lengths, now_s)
        self.placement.on_report(server, now_s)

    def server_gone(self, event: ev.ServerGone, now_s: float) -> None:
        """Everything that it held is lost; its callers will ask."""
        server = self.servers.servers.get(event.server_id)
        if server is not None and not server.gone:
            self._lose(server)
            server.gone = True
            self.placement.touched(server)
            self.credit.is_changed = True

    def _lose(self, server: StreamServer) -> None:
        for episode in list(server.episodes.values()):
            self._leave(episode)

    def server_leaving(self, event: ev.ServerLeaving, now_s: float) -> None:
        """Give its episodes' places back: they end their turns there, ask, and go on elsewhere."""
        server = self.servers.servers.get(event.server_id)
        if server is None or server.leaving or server.gone:
            return
        server.leaving = True
        for episode in list(server.episodes.values()):
            sampled = episode.running_tokens(now_s)
            ledger.note_sampled(episode, sampled)
            ledger.grow(episode, server, episode.context + sampled)
            self._leave(episode)
            episode.clock = math.inf
        self.placement.touched(server)
        self.credit.is_changed = True

    def servers_barred(self, event: ev.ServersBarred, now_s: float) -> None:
        """Bar these servers, also when they join, and no others."""
        self.barred = event.server_ids
        for server in self.servers.servers.values():
            if server.barred != (server.server_id in event.server_ids):
                server.barred = not server.barred
                self.placement.touched(server)

    def context_limited(self, event: ev.ContextLimited, now_s: float) -> None:
        """Count all episodes by tables up to the new limit."""
        if event.tokens == self._settings.context_limit:
            return
        self._settings = replace(self._settings, context_limit=event.tokens)
        self._lengths.clear()
        for server in self.servers.servers.values():
            counted = [one for one in server.episodes.values() if one.bucket >= 0]
            for episode in counted:
                ledger.uncount(episode, server)
            server.counts.clear()
            for episode in counted:
                episode.lengths = self.lengths_of(episode.group.tag)
                ledger.count(episode, server)
            self.placement.touched(server)
        for episode in self.episodes.values():
            episode.lengths = self.lengths_of(episode.group.tag)

    def calls_reported(self, event: ev.CallsReported, now_s: float) -> None:
        """Take outcomes of calls."""
        server = self.servers.calls(event, now_s)
        if server is not None:
            self.placement.touched(server)

    def refresh(self, now_s: float) -> None:
        """Compute the tables of lengths that are due, and the ledger after them."""
        due = [tag for tag, one in self._lengths.items() if one.is_due(now_s)]
        if not due:
            return
        servers = self.servers.servers.values()
        for tag in due:
            running = np.zeros(NUM_BUCKETS)
            for server in servers:
                if tag in server.counts:
                    running += server.counts[tag]
            waits = [now_s - one.since_s for one in self.in_tools.values() if one.group.tag == tag]
            self._lengths[tag].refresh(running, waits, now_s)
        for server in servers:
            ledger.rebuild(server, self._lengths)
            self.placement.touched(server)


def _may_serve(server: StreamServer | None) -> bool:
    return server is not None and not server.gone and not server.leaving
