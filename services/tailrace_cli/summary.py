"""Summary of a run: its `metrics.jsonl`, read as rows, its failures and hints, the table at its end."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.table import Column, Table

from tailrace_cli.damaged import DamagedRunError, decoded_line
from tailrace_protos.episode import Outcome
from tailrace_protos.event import (
    EpisodeSettled,
    EvaluationFinished,
    Event,
    EventBody,
    HintChanged,
    LearnerResumed,
    ModelPrepared,
    RunFailed,
    RunFinished,
    RunStarted,
    TaskSolved,
    WarmStartAdvanced,
)
from tailrace_scheduler.core.run_health import alike_text

Row = dict[str, float | int | str | None]
_rows = msgspec.json.Decoder(Row)
Baselines = Mapping[str, Mapping[str, float]]  # success by tag or named evaluation, and player
NO_BASELINES: Baselines = {}
GREEDY = "greedy"


def read_metrics(run_dir: Path) -> list[Row]:
    """Rows of a run's `metrics.jsonl`; a torn last line (the writer was killed) is left out.

    Raises `DamagedRunError`.
    """
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [_row(path, line) for line in lines if line.endswith(b"\n")]


def _row(path: Path, line: bytes) -> Row:
    row = decoded_line(_rows, line, path)
    if not isinstance(row.get("step"), int | float):
        raise DamagedRunError(path, "a row without a step")
    return row


def series(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    """Steps [n] and values [n] of the rows where `key` is a number."""
    points = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float)]
    steps = [int(step) for step, _ in points if isinstance(step, int | float)]
    values = [float(value) for _, value in points if isinstance(value, int | float)]
    return steps, values


def last(rows: Sequence[Row], key: str) -> float | None:
    """The newest number under `key`."""
    _, values = series(rows, key)
    return values[-1] if values else None


def idle_seconds(rows: Sequence[Row]) -> dict[str, float]:
    """Seconds per `idle/<cause>`, summed over the run."""
    keys = sorted(key for key in set[str]().union(*rows) if key.startswith("idle/"))
    return {key: sum(series(rows, key)[1]) for key in keys}


Line = tuple[str, str]

_SHORTEST_WAIT_S = 0.05
_SHORTEST_STOP_S = 1.0


@dataclass
class Health:
    """Failures and hints of a run, as its log tells them."""

    failures: list[tuple[str, int]] = field(default_factory=list)  # newest reason and count of a kind
    newest_failure: str = ""
    hints: list[str] = field(default_factory=list)  # that were raised, without repetitions
    failed: str = ""  # why the run ended without success
    ended_early: str = ""  # why training ended before `max_steps`
    warm_start: str = ""  # progress, while it is under way


HEALTH_MARKS = (
    b'"infra_failure"',
    b'"timeout"',
    b'"hint_changed"',
    b'"run_failed"',
    b'"run_started"',
    b'"run_finished"',
    b'"task_solved"',
    b'"learner_resumed"',
    b'"evaluation_finished"',
    b'"warm_start_advanced"',
    b'"model_prepared"',
)
_MOST_KINDS = 5
_MAX_KINDS = 2_000  # remembered: reasons may hold text of the model, each another
_MIN_VALID_SHARE = 0.95  # of an evaluation's episodes


class HealthLog:
    """Gathers a run's failures and hints from its events."""

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._newest: dict[str, str] = {}
        self._hints: dict[str, str] = {}
        self._newest_failure = ""
        self._failed = self._ended_early = self._warm_start = ""

    def apply(self, body: EventBody) -> None:
        """Take note of an event."""
        self._follow(body)
        match body:
            case EpisodeSettled(
                outcome=Outcome.INFRA_FAILURE | Outcome.TIMEOUT as outcome, reason=reason
            ):
                self._newest_failure = reason or outcome.value
                key = alike_text(self._newest_failure)
                self._counts[key] += 1
                self._newest[key] = self._newest_failure
                if len(self._counts) > _MAX_KINDS:
                    for key, _ in self._counts.most_common()[_MAX_KINDS // 2 :]:
                        del self._counts[key], self._newest[key]
            case HintChanged(name, is_raised, text) if is_raised:
                self._hints[name] = text
            case EvaluationFinished() as body:
                self._hints.update(_left_out(body))

    def _follow(self, body: EventBody) -> None:
        """Take note of how far the run is, and of how it ends."""
        match body:
            case RunFailed(reason=reason):
                self._failed = reason
            case TaskSolved(reason=reason):
                self._ended_early = reason
            case RunFinished(reason=reason) if self._ended_early:
                self._ended_early = reason
            case LearnerResumed():  # training goes on
                self._ended_early = ""
            case RunStarted():  # it goes on
                self._failed = self._warm_start = ""
            case WarmStartAdvanced(step, num_steps, loss):
                self._warm_start = f"step {step}/{num_steps}, loss {loss:.3f}"
            case ModelPrepared():
                self._warm_start = ""

    @property
    def health(self) -> Health:
        """Health so far; the commonest failures first."""
        commonest = self._counts.most_common(_MOST_KINDS)
        failures = [(self._newest[key], count) for key, count in commonest]
        hints = list(self._hints.values())
        return Health(
            failures, self._newest_failure, hints, self._failed, self._ended_early, self._warm_start
        )


def read_health(run_dir: Path) -> Health:
    """Health of a run, from `events.jsonl`; only lines that matter are decoded.

    Raises `DamagedRunError`.
    """
    log = HealthLog()
    for body in _health_events(run_dir / "events.jsonl"):
        log.apply(body)
    return log.health


def _health_events(path: Path) -> Iterator[EventBody]:
    decoder = msgspec.json.Decoder(Event)
    if not path.exists():
        return
    with path.open("rb") as lines:  # one by one: the log of a long run is large
        for line in lines:
            if not line.endswith(b"\n"):  # torn: the writer was killed
                return
            if any(mark in line for mark in HEALTH_MARKS):
                yield decoded_line(decoder, line, path).body


def _left_out(body: EvaluationFinished) -> dict[str, str]:
    """Hint on an evaluation whose means leave many episodes out, by the step's name."""
    num_valid = body.num_valid + (body.greedy.num_valid if body.greedy else 0)
    if body.tags:  # of named evaluations the first alone has the run's means
        played = (*body.tags.values(), *body.greedy_tags.values())
        num_valid = sum(one.num_valid for one in played)
    if num_valid >= _MIN_VALID_SHARE * body.num_episodes:
        return {}
    text = (
        f"the evaluation of step {body.step} counts {num_valid} of {body.num_episodes} episodes; the "
        "others failed or timed out, so its means are not to be trusted: scheduler.group_timeout_s"
    )
    return {f"evaluation/{body.step}": text}


NO_HEALTH = Health()


def summary_rows(
    rows: Sequence[Row],
    health: Health = NO_HEALTH,
    baselines: Baselines = NO_BASELINES,
    temperature: float = 1.0,
) -> list[Line]:
    """Name and value of everything worth a line, from the run's metrics and its health.

    `temperature` is that of the evaluation; `baselines` are those of `measure_baselines`.
    """
    num_steps = str(rows[-1]["step"]) if rows else "0"
    return [
        ("optimizer steps", num_steps),
        *([("warm start", health.warm_start)] if health.warm_start else []),
        *_success(rows, "eval/success_rate", sampling_name(temperature)),
        *_success(rows, "eval/greedy/success_rate", GREEDY),
        *_baselines(baselines),
        *_last_values(rows),
        *_rate(rows),
        *_staleness(rows),
        *_outcomes(rows),
        *_waits(rows),
        *_health(health),
    ]


def _health(health: Health) -> Iterator[Line]:
    for reason, count in health.failures:
        yield f"{count:,} failures", reason
    if len(health.failures) > 1:
        yield "the newest failure", health.newest_failure
    for hint in health.hints:
        yield "hint", hint
    if health.ended_early:
        yield "training ended early", health.ended_early
    if health.failed:
        yield "the run failed", health.failed


def sampling_name(temperature: float) -> str:
    """Name of the replies of an evaluation."""
    return f"sampled at temperature {temperature:g}" if temperature else GREEDY


def _success(rows: Sequence[Row], key: str, how: str) -> Iterator[Line]:
    steps, success = series(rows, key)
    for at in sorted({0, len(steps) - 1}) if steps else ():
        yield f"held-out success, {how}, step {steps[at]}", f"{success[at]:.3f}"


def _baselines(baselines: Baselines) -> Iterator[Line]:
    for name, found in baselines.items():
        of_tasks = f" ({name})" if len(baselines) > 1 else ""
        for player, success in found.items():
            yield f"held-out success of a simple player: {player}{of_tasks}", f"{success:.3f}"


def _last_values(rows: Sequence[Row]) -> Iterator[Line]:
    if (reward := last(rows, "reward_mean")) is not None:
        yield "reward of the last step", f"{reward:.3f}"
    if (wall_s := last(rows, "time_s")) is not None:
        stopped_s = _stopped_s(rows)
        of_it = f", of them {stopped_s:.1f} s stopped" if stopped_s >= _SHORTEST_STOP_S else ""
        yield "wall time", f"{wall_s:.1f} s{of_it}"


def _stopped_s(rows: Sequence[Row]) -> float:
    """Seconds of the rows in which the run was stopped: those that are neither idle nor busy."""
    stopped_s, before_s = 0.0, 0.0
    keys = sorted(key for key in set[str]().union(*rows) if key.startswith(("idle/", "busy/")))
    for row in rows:
        spent = [row.get(key) for key in keys]
        numbers = [value for value in spent if isinstance(value, int | float)]
        time_s = row.get("time_s")
        if isinstance(time_s, int | float):
            stopped_s += time_s - before_s - sum(numbers) if numbers else 0.0
            before_s = time_s
    return stopped_s


def _rate(rows: Sequence[Row]) -> Iterator[Line]:
    """Over all steps: single ones, late in a run, may have nothing left to train on."""
    times = series(rows, "time_s")[1]
    num_tokens = sum(series(rows, "num_trained_tokens")[1])
    seconds = times[-1] - times[0] - _stopped_s(rows) if times else 0.0
    if num_tokens and seconds > 0:
        yield "trained tokens per second", f"{num_tokens / seconds:,.0f}"


def _staleness(rows: Sequence[Row]) -> Iterator[Line]:
    _, staleness = series(rows, "staleness_max")
    if staleness:
        yield "staleness of trained tokens, at most", f"{max(staleness):.0f} steps"


def _outcomes(rows: Sequence[Row]) -> Iterator[Line]:
    for key in sorted({key for row in rows for key in row if key.startswith("outcome/")}):
        total = sum(series(rows, key)[1])
        if total:
            yield f"episodes {key.removeprefix('outcome/')}", f"{total:,.0f}"


def _waits(rows: Sequence[Row]) -> Iterator[Line]:
    for key, seconds in idle_seconds(rows).items():
        if seconds >= _SHORTEST_WAIT_S:
            yield f"waiting for {key.removeprefix('idle/')}", f"{seconds:.1f} s"


def summary_table(title: str, lines: Sequence[Line]) -> Table:
    """The lines of `summary_rows` as a table for the terminal."""
    table = Table(
        Column(overflow="fold"), Column(overflow="fold"), title=title, show_header=False
    )  # paths and names are whole
    for name, value in lines:
        table.add_row(name, value)
    return table
