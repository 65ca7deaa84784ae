"""Early ends at the staleness horizon: the longest rest first, within the permitted waste."""

from tailrace_scheduler.core.streams import decisions as de
from tailrace_scheduler.core.streams import events as ev
from tailrace_scheduler.core.streams.core import StreamCore
from tailrace_scheduler.core.streams.settings import StreamSettings


class FakeStep:
    """A group of four at the horizon: member 0 has ended, the others play; the learner waits."""

    def __init__(self, min_valid: int = 1, max_waste: float = 0.5) -> None:
        self.core = StreamCore(
            StreamSettings(
                max_staleness=0, groups_per_step=1, context_limit=20_000, max_waste=max_waste
            )
        )
        self.now_s = 0.0
        self.report(num_running=40)
        self.learn_lengths()
        self.core.on(ev.StepDone(1, 100_000), self.now_s)
        self.core.on(ev.GroupOpened("g", 4, "task", 100, min_valid=min_valid), self.now_s)
        self.core.decide(self.now_s)
        self.core.on(ev.EpisodeEnded("g.0", True, 1_000), self.now_s)

    def report(self, num_running: int) -> None:
        report = ev.ServerReport("s", num_running=num_running, step_s=0.01, policy_version=0)
        self.core.on(report, self.now_s)

    def learn_lengths(self) -> None:
        """Episodes end after 1,000 tokens, and some after 15,000; a token takes 10 ms."""
        lengths = self.core.book.lengths_of("task")
        for number in range(100):
            tokens = 1_000 if number % 10 else 15_000
            lengths.ended(tokens, True)
            lengths.lived(tokens, tokens * 0.01)
        self.core.book.refresh(self.now_s)

    def context(self, member: int, tokens: int) -> None:
        self.core.on(ev.TurnEnded(f"g.{member}", tokens), self.now_s)

    def ended_in(self, seconds: int) -> list[tuple[int, ...]]:
        """Members of each decision, in seconds with a server that runs nearly empty."""
        found = []
        for _ in range(seconds):
            self.now_s += 1.0
            self.report(num_running=1)
            self.core.select(self.now_s, 1)
            found += [
                one.members for one in self.core.decide(self.now_s) if isinstance(one, de.CloseGroup)
            ]
        return found


def test_the_members_with_the_longest_rest_end_and_the_others_go_on() -> None:
    step = FakeStep()
    step.context(1, 3_000)  # a long one, with 12,000 tokens to go
    step.context(2, 14_900)
    step.context(3, 14_900)
    assert step.ended_in(2) == [(1,)]


def test_no_more_is_thrown_away_than_permitted() -> None:
    step = FakeStep(max_waste=0.02)  # about 2,000 tokens of those trained before
    for member in (1, 2, 3):
        step.context(member, 3_000)
    assert step.ended_in(300) == []


def test_a_group_that_would_keep_too_few_members_is_deferred() -> None:
    step = FakeStep(min_valid=4)
    for member in (1, 2, 3):
        step.context(member, 3_000)
    assert step.ended_in(60) == []
    assert step.core.book.groups["g"].version == 2, "it is due one step later"
