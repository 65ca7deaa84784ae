"""The simulated agents: they open groups, play episodes on the engines, and tell the scheduler.

Every event of episodes that the services would send is sent here.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tailrace_cli.simulation.engine import SimEngine, SimTurn
from tailrace_cli.simulation.learner import SimLearner
from tailrace_cli.simulation.records import SimEpisode, SimGroup, SimSettings
from tailrace_cli.simulation.timetable import Timetable
from tailrace_cli.simulation.workload import EpisodePlan, Workload
from tailrace_scheduler.core.streaming import PROMPT_TOKENS
from tailrace_scheduler.core.streams import decisions as de
from tailrace_scheduler.core.streams import events as ev
from tailrace_scheduler.core.streams.core import StreamCore

FAIL_S = 0.05  # until a failing server has refused a call
FIRST_RETRY_S, LAST_RETRY_S = 0.5, 8.0  # delays of calls that are repeated at the same server


class Hooks:
    """Further events and abilities of a system; these are ours."""

    num_retries: int | None = None
    """Calls to the same server after a failed one, before the episode fails. None: the scheduler names
    another server."""

    sees_cache = False
    """Whether the scheduler is told how much of a prefix its server still has."""

    def on_episode(self, tokens: int) -> None:
        """An episode ended with this context."""

    def on_step(self) -> None:
        """A step ended."""


class SimWorkers:
    """Groups and episodes that are under way. `decide` is called when the scheduler has news."""

    def __init__(
        self,
        settings: SimSettings,
        workload: Workload,
        *,
        time: Timetable,
        core: StreamCore,
        engines: dict[str, SimEngine],
        learner: SimLearner,
        hooks: Hooks,
        decide: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._workload = workload
        self._rng = np.random.default_rng(settings.seed)
        self._time = time
        self._core = core
        self._engines = engines
        self._learner = learner
        self._hooks = hooks
        self._decide = decide
        self.closed: dict[str, None] = {}  # groups that wait for the learner, in closing order
        self._groups: dict[str, SimGroup] = {}
        self._episodes: dict[str, SimEpisode] = {}
        self._num_groups = 0

    def _tell(self, event: ev.Event) -> None:
        self._core.on(event, self._time.now_s)

    @property
    def first_start_s(self) -> float:
        """Start of the oldest group that the learner has not had; infinite if there is none."""
        oldest = next(iter(self._groups.values()), None)
        return oldest.started_s if oldest and oldest.started_s >= 0 else math.inf

    # Decisions of the scheduler.

    def draw(self, members: int) -> list[EpisodePlan]:
        """Draw the episodes of a group."""
        return self._workload.draw(self._rng, members)

    def open_group(self, plans: list[EpisodePlan] | None = None) -> SimGroup:
        """Announce a group of these episodes, or of ones to draw."""
        group_id = f"g{self._num_groups}"
        self._num_groups += 1
        plans = plans or self.draw(self._settings.group_size)
        group = SimGroup(group_id, [], len(plans))
        for member, plan in enumerate(plans):
            episode = SimEpisode(f"{group_id}.{member}", plan, group)
            group.episodes.append(episode)
            self._episodes[episode.episode_id] = episode
        self._groups[group_id] = group
        prompt = min(PROMPT_TOKENS, self._workload.context_limit // 4)  # as a real scheduler expects
        least = min(self._settings.min_valid, len(plans))
        self._tell(ev.GroupOpened(group_id, len(plans), self._workload.name, prompt, min_valid=least))
        return group

    def start(self, decision: de.StartEpisode) -> None:
        """Play the first turn of an episode."""
        episode = self._episodes[decision.episode_id]
        if episode.group.started_s < 0:
            episode.group.started_s = self._time.now_s
        self._play(episode, decision.server_id)
        self._tell(ev.ToolEnded(episode.episode_id, episode.plan[0].input_tokens))

    def go_on(self, decision: de.ContinueTurn) -> None:
        """Play the turn that waited."""
        episode = self._episodes.get(decision.episode_id)
        if episode is None or episode.outcome:
            return
        if episode.server != decision.server_id:
            self._release(episode)
        self._play(episode, decision.server_id)

    def _release(self, episode: SimEpisode) -> None:
        """Tell the engine that nobody asks for this context again, where engines can be told."""
        if episode.server and self._settings.releases_prefixes:
            self._engines[episode.server].release(episode.episode_id)

    def close(self, decision: de.CloseGroup | de.DropGroup) -> None:
        """Cut these members; a dropped group is thrown away whole."""
        group = self._groups[decision.group_id]
        self.cut(group, decision.members)
        if isinstance(decision, de.DropGroup):
            self.throw(group)
            self._learner.count_natural(group)
            self._tell(ev.GroupsDropped((group.group_id,)))

    def cut(self, group: SimGroup, members: Iterable[int]) -> None:
        """End these members if they play or wait; their tokens are thrown away."""
        for member in members:
            if not group.episodes[member].outcome:
                self._cut(group.episodes[member])

    def throw(self, group: SimGroup) -> None:
        """Forget a group; the tokens of its members are thrown away."""
        for episode in group.episodes:
            self._learner.throw(episode)
        self.closed.pop(group.group_id, None)
        self._groups.pop(group.group_id, None)

    def hand_over(self, group_id: str) -> SimGroup:
        """Give a group to the learner."""
        self._tell(ev.GroupsTaken((group_id,)))
        del self.closed[group_id]
        return self._groups.pop(group_id)

    # Turns.

    def _play(self, episode: SimEpisode, server_id: str) -> None:
        plan, known = episode.plan[episode.turn], episode.context
        turn = SimTurn(episode.episode_id, known + plan.input_tokens, known, plan.output_tokens)
        self._submit(episode, server_id, turn)

    def _submit(self, episode: SimEpisode, server_id: str, turn: SimTurn) -> None:
        engine, now_s = self._engines[server_id], self._time.now_s
        episode.server = server_id
        if engine.fails:
            self._time.at(now_s + FAIL_S, self._failed, episode, turn.context)
            return
        engine.submit(turn, now_s)
        self.reschedule(engine)

    def _failed(self, episode: SimEpisode, context: int) -> None:
        if episode.outcome:
            return
        server_id, retries = episode.server, self._hooks.num_retries
        self._tell(ev.CallsReported(server_id, 1, 0))
        episode.num_failed += 1
        if retries is None:
            episode.server = ""
            self._tell(ev.TurnAsked(episode.episode_id, context, server_id, failed=True))
        elif episode.num_failed <= retries:
            delay_s = min(FIRST_RETRY_S * 2.0 ** (episode.num_failed - 1), LAST_RETRY_S)
            self._time.at(self._time.now_s + delay_s, self._failed, episode, context)
            return
        else:
            self._cut(episode)
        self._decide()

    def reschedule(self, engine: SimEngine) -> None:
        """Look at an engine when its next turn ends, if that is earlier than the next look."""
        due_s = engine.next_event_s()
        if due_s < engine.scheduled_s:
            engine.scheduled_s = due_s
            self._time.at(max(due_s, self._time.now_s), self._engine_due, engine, due_s)

    def _engine_due(self, engine: SimEngine, due_s: float) -> None:
        if due_s != engine.scheduled_s:
            return
        engine.scheduled_s = math.inf
        engine.advance(self._time.now_s)
        has_ended = False
        for turn in engine.finished():
            has_ended |= self._turn_ended(engine, turn)
        if engine.waiting:
            engine.admit()
        self.reschedule(engine)
        if has_ended:
            self._decide()

    def _turn_ended(self, engine: SimEngine, turn: SimTurn) -> bool:
        """Go on to the tool call; True if the episode is over, which frees room."""
        episode = self._episodes[turn.episode_id]
        _keep_spans(episode, engine, turn)
        episode.context = turn.context
        plan = episode.plan[episode.turn]
        episode.turn += 1
        engine.keep_idle(episode.episode_id, turn.context)
        if episode.turn == len(episode.plan):
            self._release(episode)
            self._tell(ev.EpisodeEnded(episode.episode_id, True, episode.context))
            self._hooks.on_episode(episode.context)
            self._settle(episode, "valid")
            return True
        self._tell(ev.TurnEnded(episode.episode_id, turn.context))
        self._tell(ev.ToolStarted(episode.episode_id))
        self._time.at(self._time.now_s + plan.tool_s, self._tool_ended, episode, plan.tool_s)
        return False

    def _tool_ended(self, episode: SimEpisode, waited_s: float) -> None:
        if episode.outcome:
            return
        context = episode.context + episode.plan[episode.turn].input_tokens
        if waited_s < self._core.ask_after_s:
            self._tell(ev.ToolEnded(episode.episode_id, context))
            self._play(episode, episode.server)
            return
        cached = -1
        if self._hooks.sees_cache:
            cached = self._engines[episode.server].cached(episode.episode_id)
        self._tell(ev.TurnAsked(episode.episode_id, context, episode.server, cached))
        self._decide()

    # Ends.

    def _cut(self, episode: SimEpisode) -> None:
        if episode.server:
            engine = self._engines[episode.server]
            turn = engine.abort(episode.episode_id, self._time.now_s)
            if turn is not None:
                _keep_spans(episode, engine, turn)
            self._release(episode)
            self.reschedule(engine)
        self._learner.throw(episode)
        self._tell(ev.EpisodeEnded(episode.episode_id, False, 0, finished=False))
        self._settle(episode, "cut")

    def _settle(self, episode: SimEpisode, outcome: str) -> None:
        episode.outcome = outcome
        group = episode.group
        group.unsettled -= 1
        del self._episodes[episode.episode_id]
        if group.unsettled == 0:
            self._learner.tally.latencies_s.append(self._time.now_s - max(group.started_s, 0.0))
            valid = sum(one.outcome == "valid" for one in group.episodes)
            self._tell(ev.GroupComplete(group.group_id, valid))
            if valid >= min(self._settings.min_valid, len(group.episodes)):
                self.closed[group.group_id] = None
            else:
                self._learner.lose()
                self.throw(group)
            self._learner.may_select = True


def hooks_of(rule: Any) -> Hooks:
    """Return the hooks of a placement rule; those that do nothing if it has none."""
    return rule if hasattr(rule, "on_step") else Hooks()


def _keep_spans(episode: SimEpisode, engine: SimEngine, turn: SimTurn) -> None:
    episode.spans += [(engine, *segment) for segment in turn.segments]
