"""The critical path of a run: each second has one cause, and the causes are those of the events."""

import io
import random
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from tailrace.config import ConfigError
from tailrace_cli.commands.why import show_times
from tailrace_cli.reference import find
from tailrace_cli.why.causes import REMEDIES, Cause
from tailrace_cli.why.path import PathPart, path_of_episode, path_of_run
from tailrace_cli.why.timeline import timeline_of
from tailrace_protos.base import decode_json, encode_json
from tailrace_protos.episode import Outcome, StageSeconds
from tailrace_protos.event import (
    EpisodeRedelivered,
    EpisodeSettled,
    EvaluationFinished,
    EvaluationStarted,
    Event,
    EventBody,
    GroupAdmitted,
    GroupClosed,
    RunStarted,
    ServerWeightsApplied,
    StepFinished,
)
from tailrace_protos.subjects import Phase

MEASURED = StageSeconds(prefill_s=1.0, decode_s=3.0, reward_s=0.5)


class Log:
    """Events of a run that a test writes."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.at(0.0, RunStarted("run", ""))

    def at(self, unix_s: float, body: EventBody) -> None:
        self.events.append(Event(str(len(self.events)), 1000 + unix_s, "test", body))

    def group(
        self,
        name: str,
        admitted: float,
        episodes: list[tuple[float, float]],
        closed: float,
        *,
        stages: StageSeconds = MEASURED,
        outcome: Outcome = Outcome.OK,
        phase: Phase = "train",
    ) -> None:
        """A group with the start and the end of each episode."""
        self.at(admitted, GroupAdmitted(name, 0, phase, len(episodes), 0))
        for member, (start, end) in enumerate(episodes):
            settled = EpisodeSettled(
                f"{name}.{member}",
                name,
                member,
                phase,
                outcome,
                "",
                1.0,
                1.0,
                10,
                2,
                0,
                0,
                1000 + start,
                1000 + end,
                stages=stages,
            )
            self.at(end, settled)
        self.at(closed, GroupClosed(name, phase, len(episodes), len(episodes), True, 1))

    def step(self, number: int, groups: tuple[str, ...], start: float, end: float) -> None:
        body = StepFinished("l", number, number, groups, 0, 1000 + start, 1000 + end, {})
        self.at(end, body)

    def seconds(self) -> dict[Cause, float]:
        return summed(path_of_run(timeline_of(self.events)))


def summed(path: list[PathPart]) -> dict[Cause, float]:
    seconds = Counter[Cause]()
    for part in path:
        seconds[part.cause] += part.seconds  # type: ignore[assignment]
    return dict(seconds)


def test_a_step_waits_for_the_slowest_member_of_its_newest_group() -> None:
    log = Log()
    log.group("a", 2, [(2.5, 4)], 4)
    log.group("b", 2, [(2.5, 5), (3, 10)], 10.25)
    log.step(1, ("a", "b"), 4, 12)
    assert log.seconds() == pytest.approx(
        {
            Cause.START: 2,
            Cause.QUEUE: 1,
            Cause.PREFILL: 1,
            Cause.DECODE: 3,
            Cause.REWARD: 0.5,
            Cause.TOOLS: 2.5,
            Cause.GROUP: 0.25,
            Cause.LEARNER: 1.75,
        }
    )


def test_a_step_whose_groups_were_there_waits_for_the_step_before() -> None:
    log = Log()
    log.group("a", 1, [(1, 6)], 6)
    log.group("b", 1, [(1, 7)], 7)
    log.step(1, ("a",), 6, 16)
    log.step(2, ("b",), 16, 26)
    assert log.seconds()[Cause.LEARNER] == pytest.approx(20)


def test_an_admission_waits_for_the_weights_of_the_step_before_it() -> None:
    log = Log()
    log.group("a", 1, [(1, 6)], 6)
    log.step(1, ("a",), 6, 8)
    log.at(11, ServerWeightsApplied("s0", 1, 0.1))
    log.group("b", 11.25, [(11.25, 20)], 20)
    log.at(30, ServerWeightsApplied("late", 1, 0.1))  # a server that joined afterwards
    log.step(2, ("b",), 20, 31)
    seconds = log.seconds()
    assert seconds[Cause.WEIGHTS] == pytest.approx(3)
    assert seconds[Cause.ADMISSION] == pytest.approx(0.25)


def test_a_run_that_was_stopped_lost_no_time_but_that_of_its_next_start() -> None:
    log = Log()
    log.group("a", 1, [(1, 6)], 6)
    log.step(1, ("a",), 6, 8)
    log.at(9, ServerWeightsApplied("s0", 1, 0.1))
    log.at(5000, RunStarted("run", ""))
    log.at(5004, ServerWeightsApplied("s0", 1, 0.1))
    log.group("b", 5004, [(5004, 5012)], 5012)
    log.step(2, ("b",), 5012, 5013)
    timeline = timeline_of(log.events)
    assert timeline.stopped_s == pytest.approx(4991)
    seconds = summed(path_of_run(timeline))
    assert sum(seconds.values()) == pytest.approx(5013 - 4991)
    assert seconds[Cause.START] == pytest.approx(1 + 4)
    assert seconds[Cause.WEIGHTS] == pytest.approx(1)
    assert seconds[Cause.LEARNER] == pytest.approx(2 + 1)


def often_stopped(num_starts: int) -> list[Event]:
    """Events of a run in which every second but the last of ten was spent between two schedulers."""
    log = Log()
    for start in range(1, num_starts):
        log.at(10 * start, RunStarted("run", ""))
        log.group(f"g{start}", 10 * start, [(10 * start, 10 * start + 1)], 10 * start + 1)
    return log.events


def test_of_many_stops_each_takes_its_seconds_from_what_follows() -> None:
    timeline = timeline_of(often_stopped(50))
    assert timeline.stopped_s == pytest.approx(10 + 48 * 9)
    closings = [unix_s - timeline.began for unix_s, _ in timeline.closings]
    assert closings == pytest.approx(range(1, 50))
    spans = [(one.started_unix_s, one.finished_unix_s) for one in timeline.episodes.values()]
    assert spans == [
        (pytest.approx(timeline.began + n), pytest.approx(timeline.began + n + 1)) for n in range(49)
    ]


def test_an_event_takes_as_long_after_many_stops_as_after_few() -> None:
    """The log of weeks has millions of events and hundreds of starts."""
    few, many = (calls_per_event(often_stopped(num_starts)) for num_starts in (10, 300))
    assert many < 2 * few


def test_a_long_run_fits_into_memory() -> None:
    """The log of weeks has ten million episodes; the path needs one of each group."""
    log = Log()
    for n in range(300):
        stages = replace(MEASURED, reward_s=n / 7)
        log.group(f"g{n}", n, [(n, n + member / 100) for member in range(64)], n + 1, stages=stages)
    tracemalloc.start()
    timeline = timeline_of((decode_json(encode_json(one), Event) for one in log.events), bool)
    everything, _ = tracemalloc.get_traced_memory()
    timeline = timeline_of((decode_json(encode_json(one), Event) for one in log.events), "".__eq__)
    needed, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert timeline.num_episodes == 300 * 64
    assert needed < everything / 10


def calls_per_event(events: list[Event]) -> float:
    """Calls of Python functions, resumed generators among them."""
    calls = Counter[str]()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        timeline_of(events)
    finally:
        sys.setprofile(None)
    return calls["call"] / len(events)


def test_a_late_admission_waits_for_the_group_that_made_room() -> None:
    log = Log()
    log.group("a", 1, [(1, 9)], 9)
    log.group("b", 9.125, [(9.125, 15)], 15)
    log.step(1, ("b",), 15, 16)
    seconds = log.seconds()
    assert seconds[Cause.ADMISSION] == pytest.approx(0.125)
    assert seconds[Cause.DECODE] == pytest.approx(6)
    assert seconds[Cause.START] == pytest.approx(1)


def test_evaluations_and_lost_attempts_have_causes_of_their_own() -> None:
    log = Log()
    log.at(2, EvaluationStarted("e0", 0, 0, 4))
    log.at(7, EvaluationFinished("e0", 0, 0.5, 0.5, 4, 4))
    log.at(9, EpisodeRedelivered("a.0", 1, "lost"))
    log.group("a", 8, [(10, 15)], 15)
    log.step(1, ("a",), 15, 16)
    seconds = log.seconds()
    assert seconds[Cause.EVALUATION] == pytest.approx(5)
    assert seconds[Cause.START] == pytest.approx(3)
    assert seconds[Cause.LOST] == pytest.approx(1)
    assert seconds[Cause.QUEUE] == pytest.approx(1)


@pytest.mark.parametrize(("room_s", "room", "queue"), [(0, 0, 6), (4, 4, 2), (9, 6, 0), (-1, 0, 6)])
def test_a_wait_for_a_server_with_room_is_none_for_a_worker(
    room_s: float, room: float, queue: float
) -> None:
    """In the order of time: for a server, then for a worker; clocks that differ shift nothing else."""
    log = Log()
    log.group("a", 1, [(7, 15)], 15, stages=replace(MEASURED, room_s=room_s))
    log.step(1, ("a",), 15, 16)
    path = path_of_episode(timeline_of(log.events), "a.0")
    expected = [(Cause.ROOM, room), (Cause.QUEUE, queue)]
    assert [(one.cause, one.seconds) for one in path[:2] if one.cause is not Cause.TOOLS] == [
        pytest.approx(one) for one in expected if one[1]
    ]
    assert log.seconds().get(Cause.ROOM, 0.0) == pytest.approx(room)


def test_waits_of_an_older_log_are_for_workers() -> None:
    written = b'{"prefill_s": 1.0, "decode_s": 3.0, "reward_s": 0.5}'
    assert decode_json(written, StageSeconds) == MEASURED
    log = Log()
    log.group("a", 1, [(7, 15)], 15, stages=decode_json(written, StageSeconds))
    log.step(1, ("a",), 15, 16)
    seconds = log.seconds()
    assert (seconds[Cause.QUEUE], Cause.ROOM in seconds) == (pytest.approx(6), False)


def test_parallel_calls_never_sum_to_more_than_the_episode() -> None:
    log = Log()
    log.group("a", 0, [(0, 4)], 4, stages=StageSeconds(6.0, 10.0, 0.0))
    log.step(1, ("a",), 4, 5)
    seconds = log.seconds()
    assert seconds[Cause.PREFILL] == pytest.approx(1.5)
    assert seconds[Cause.DECODE] == pytest.approx(2.5)
    assert Cause.TOOLS not in seconds


def test_calls_of_another_process_are_named_so() -> None:
    log = Log()
    log.group("a", 0, [(0, 4)], 4, stages=StageSeconds(reward_s=1.0))
    log.step(1, ("a",), 4, 5)
    assert log.seconds()[Cause.OUTSIDE] == pytest.approx(3)


def test_a_group_without_a_played_member_is_a_wait_for_its_closing() -> None:
    log = Log()
    log.group("a", 1, [(9, 9)], 9, outcome=Outcome.CANCELLED)
    log.step(1, ("a",), 9, 10)
    assert log.seconds()[Cause.GROUP] == pytest.approx(8)


def test_the_path_of_an_episode_ends_with_the_step_that_trained_it() -> None:
    log = Log()
    log.group("a", 1, [(2, 8), (2, 9)], 9)
    log.group("b", 1, [(2, 12)], 12)
    log.step(1, ("a", "b"), 9, 14)
    path = path_of_episode(timeline_of(log.events), "a.0")
    assert [part.cause for part in path] == [
        Cause.QUEUE,
        Cause.TOOLS,
        Cause.PREFILL,
        Cause.DECODE,
        Cause.REWARD,
        Cause.GROUP,
        Cause.BATCH,
        Cause.LEARNER,
    ]
    assert sum(part.seconds for part in path) == pytest.approx(13)
    assert summed(path)[Cause.BATCH] == pytest.approx(3)


@pytest.mark.parametrize("seed", range(30))
def test_the_parts_of_any_run_sum_to_its_time(seed: int) -> None:
    random_ = random.Random(seed)
    log, now, number = Log(), 0.0, 0
    for step in range(1, 8):
        names = []
        for _ in range(random_.randint(1, 4)):
            number += 1
            names.append(f"g{number}")
            admitted = max(0.0, now - random_.uniform(-3, 9))
            starts = [admitted + random_.uniform(0, 2) for _ in range(random_.randint(1, 3))]
            episodes = [(start, start + random_.uniform(0.1, 12)) for start in starts]
            closed = max(end for _, end in episodes) + random_.uniform(0, 0.2)
            log.group(names[-1], admitted, episodes, closed)
        closings = [e.unix_s - 1000 for e in log.events if isinstance(e.body, GroupClosed)]
        started = max(now, *closings[-len(names) :])
        now = started + random_.uniform(0.1, 3)
        log.step(step, tuple(names), started, now)
        log.at(now + random_.uniform(0, 0.4), ServerWeightsApplied("s0", step, 0.1))
    timeline = timeline_of(log.events)
    path = path_of_run(timeline)
    assert sum(part.seconds for part in path) == pytest.approx(timeline.ended - timeline.began)


def test_every_cause_has_a_remedy_with_known_keys() -> None:
    assert set(REMEDIES) == set(Cause)
    for remedy in REMEDIES.values():
        for key in remedy.keys:
            assert find(key), key  # raises for an unknown key


def shown(run: Path, episode: str = "") -> str:
    text = io.StringIO()
    show_times(str(run), episode, "runs", Console(file=text, width=120))
    return text.getvalue()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    log = Log()
    log.group("a", 1, [(2, 8)], 8)
    log.step(1, ("a",), 8, 20)
    lines = b"".join(encode_json(event) + b"\n" for event in log.events)
    (tmp_path / "events.jsonl").write_bytes(lines + b'{"seq": "torn')
    return tmp_path


def test_the_command_names_the_largest_causes_with_their_settings(run_dir: Path) -> None:
    text = shown(run_dir)
    assert "1. learner (longest: 12.0 s, step 1)" in text
    assert "learner.max_tokens_per_micro_batch" in text
    assert "2. decode (longest: 3.0 s, a.0)" in shown(run_dir / "events.jsonl")
    assert "a.0: ok, 2 turns" in shown(run_dir, "a.0")


def test_unknown_runs_episodes_and_lines_are_named(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run .*nowhere.*give its directory"):
        shown(run_dir / "nowhere")
    with pytest.raises(ConfigError, match=r"--episode b\.0: .*one of its 1 is a\.0"):
        shown(run_dir, "b.0")
    (run_dir / "events.jsonl").write_bytes(b'{"seq": 1}\n')
    with pytest.raises(ConfigError, match=r"events\.jsonl:1 is no event"):
        shown(run_dir)
    (run_dir / "events.jsonl").write_bytes(b"")
    with pytest.raises(ConfigError, match="nothing has happened yet"):
        shown(run_dir)
