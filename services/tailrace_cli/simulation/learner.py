"""The simulated learner: which groups it asks for, how long it trains them, and the tally of tokens.

A token is trained if it is at most `max_staleness` steps old when the learner takes its group. Tokens
count if their engine sampled them in the measured window (`SimEngine.window`).
"""

from typing import NamedTuple

from tailrace_cli.simulation.measures import Tally, Tokens, solo_s
from tailrace_cli.simulation.records import SimEpisode, SimGroup, SimSettings, SimSpan
from tailrace_cli.simulation.workload import natural_tokens


class _EpisodeTokens(NamedTuple):
    """Sums over the tokens of one episode."""

    whole: Tokens
    kept: Tokens  # not masked
    measured: Tokens  # sampled in the window
    useful: Tokens  # both


class SimLearner:
    """Takes one group after the other until the slots of a step are full."""

    def __init__(self, settings: SimSettings, capacity: float) -> None:
        self._settings = settings
        self._capacity = capacity
        self.version = 0
        self.tally = Tally()
        self.may_select = True  # something changed since the last look
        self.num_lost = 0  # groups with too few valid members in the present step
        self._slots = settings.groups_per_step
        self._is_busy = False
        self._step_tokens = 0.0
        self._step_path_s = 0.0

    def slots_to_fill(self, num_ready: int) -> int:
        """Return the slots to select groups for now; 0 while it trains or has looked already."""
        if self._is_busy or self._slots == 0 or not self.may_select:
            return 0
        self.may_select = False
        if self._settings.synchronous and num_ready < self._slots:
            return 0
        return self._slots

    def take(self, group: SimGroup) -> float:
        """Begin to train a group; returns the seconds that it takes."""
        self._slots -= 1
        self._is_busy = True
        took_s = self._settings.learner_s(self._count(group), self._capacity)
        self.tally.learner_s += took_s
        return took_s

    def trained(self) -> bool:
        """End the training of a group; True if it was the last of the step."""
        self._is_busy, self.may_select = False, True
        return self._slots == 0

    def finish_step(self) -> int:
        """Begin the next version; returns the tokens that the step trained."""
        tokens = int(self._step_tokens)
        self.version += 1
        self.num_lost = 0
        self.tally.steps += 1
        self.tally.paths_s.append(self._step_path_s)
        self._slots, self._step_tokens, self._step_path_s = self._settings.groups_per_step, 0.0, 0.0
        return tokens

    def lose(self) -> None:
        """Count a group with too few valid members."""
        self.tally.num_lost += 1
        self.num_lost += 1

    def throw(self, episode: SimEpisode) -> None:
        """Count the tokens of an episode as thrown away."""
        for engine, start, end, _, _ in episode.spans:
            first, last = max(start, engine.window[0]), min(end, engine.window[1])
            self.tally.thrown += max(last - first, 0)
        episode.spans = []

    def count_natural(self, group: SimGroup) -> None:
        """Count the tokens that a trained or dropped group would have if nothing were cut."""
        self.tally.natural += sum(natural_tokens(one.plan) for one in group.episodes)
        self.tally.num_natural += len(group.episodes)

    def _count(self, group: SimGroup) -> Tokens:
        """Add a group's valid members to the tally; returns all of their tokens, masked ones too."""
        everything = Tokens()
        valid = [one for one in group.episodes if one.outcome == "valid"]
        for episode in valid:
            tokens = self._tokens(episode)
            everything.add(tokens.whole)
            self.tally.trained.add(tokens.kept)
            self.tally.useful.add(tokens.useful)
            self.tally.masked += tokens.measured.sampled - tokens.useful.sampled
            self.tally.lengths += natural_tokens(episode.plan)
            self.tally.num_lengths += 1
            self._step_tokens += tokens.kept.sampled
        self._step_path_s = max(
            [self._step_path_s, *(solo_s(self._settings.engine, one.plan) for one in valid)]
        )
        self.count_natural(group)
        return everything

    def _tokens(self, episode: SimEpisode) -> "_EpisodeTokens":
        """Return sums over the tokens of an episode."""
        sums = _EpisodeTokens(Tokens(), Tokens(), Tokens(), Tokens())
        for span in episode.spans:
            engine, start, end, _, prefilled = span
            is_measured = engine.window[0] <= start < engine.window[1]
            sums.whole.prefilled += prefilled
            sums.measured.prefilled += prefilled if is_measured else 0
            bumps = engine.bump_steps
            for version in range(self.version, -1, -1):
                begin = max(start, bumps[version])
                if begin < end:
                    self._add_part(sums, span, (begin, end), self.version - version)
                    end = begin
                if end <= start:
                    break
        if sums.kept.sampled:
            sums.kept.prefilled, sums.useful.prefilled = sums.whole.prefilled, sums.measured.prefilled
        return sums

    def _add_part(
        self, sums: "_EpisodeTokens", span: SimSpan, steps: tuple[int, int], age: int
    ) -> None:
        """Add the tokens that these steps of a span sampled, all of one age."""
        engine, start, _, context, _ = span
        part = _part(steps[0] - start, steps[1] - start, context)
        begin, end = max(steps[0], engine.window[0]), min(steps[1], engine.window[1])
        if (begin, end) == steps:
            measured = part
        else:
            measured = _part(begin - start, end - start, context) if begin < end else Tokens()
        self.tally.ages[age] = self.tally.ages.get(age, 0.0) + measured.sampled
        is_kept = age <= self._settings.max_staleness
        sums.whole.add(part)
        sums.measured.add(measured)
        if is_kept:
            sums.kept.add(part)
            sums.useful.add(measured)


def _part(begin: float, end: float, context: int) -> Tokens:
    """Return the sum over the sampled tokens `begin` to `end` of a turn with this context."""
    tokens = end - begin
    return Tokens(tokens, tokens * (context + (begin + end) / 2))
