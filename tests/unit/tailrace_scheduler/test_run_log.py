"""Rows of `metrics.jsonl` as a fold over events."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path

import msgspec

from tailrace_protos.episode import Outcome
from tailrace_protos.event import (
    EvaluationFinished,
    EvaluationStarted,
    Event,
    EventBody,
    LearnerResumed,
    StepFinished,
    TagEvaluation,
    TrainingEnded,
)
from tailrace_scheduler.core.run_log import METRIC_KEYS, Change, Rewind, Rows, RunLog
from tailrace_scheduler.ports import Row
from tests.unit.tailrace_scheduler.simulation import made_settlement


class Log:
    """A run log whose steps 0 and 2 are evaluated; its clock ticks once an event."""

    def __init__(self) -> None:
        self.log = RunLog(lambda step: step in (0, 2))
        self.now_s = 100.0

    def apply(self, body: EventBody) -> list[Change]:
        self.now_s += 1.0
        event = Event("1-1", self.now_s, "test", body)
        return self.log.apply(event, lambda wall_s, busy_s: {"idle/credit": wall_s - busy_s})

    def evaluate(self, step: int, num_valid: int = 4) -> list[Change]:
        self.apply(EvaluationStarted(f"e{step}", step, step, 4))
        return self.apply(EvaluationFinished(f"e{step}", step, 0.5, 0.5, num_valid, 4))

    def step(self, step: int, lineage: str = "L", **metrics: float) -> list[Change]:
        return self.apply(StepFinished(lineage, step, step + 10, ("g",), 0, 0.0, 0.0, metrics))


def steps_of(changes: list[Change]) -> list[object]:
    return [change["step"] for change in changes if isinstance(change, dict)]


def test_the_first_row_is_the_first_evaluation_and_has_every_key() -> None:
    log = Log()
    log.apply(LearnerResumed("L", 0, 0, ""))
    [row] = log.evaluate(0)
    assert isinstance(row, dict)
    assert set(row) == set(METRIC_KEYS)
    assert (row["step"], row["eval/success_rate"], row["policy_version"]) == (0, 0.5, 0)
    assert (row["time_s"], row["idle/credit"], row["loss"], row["outcome/ok"]) == (2.0, 2.0, None, 0)


def test_a_row_waits_for_the_evaluation_of_its_step_and_holds_back_the_next() -> None:
    log = Log()
    log.apply(LearnerResumed("L", 0, 0, ""))
    log.evaluate(0)
    assert steps_of(log.step(1)) == [1]
    assert log.step(2) == []
    assert log.step(3) == []
    assert steps_of(log.evaluate(2)) == [2, 3]


def test_where_training_ends_early_the_last_row_gets_a_mark_and_a_late_evaluation() -> None:
    log = Log()
    log.apply(LearnerResumed("L", 0, 0, ""))
    changes = [*log.evaluate(0), *log.step(1)]
    assert log.apply(TrainingEnded("K", 1)) == []
    changes += [*log.apply(TrainingEnded("L", 1)), *log.evaluate(1)]
    rows = Rows(changes)
    assert [(row["step"], row["eval/success_rate"]) for row in rows] == [(0, 0.5), (1, 0.5)]
    assert [row.get("task_solved") for row in rows] == [None, 1]


def test_folded_rows_are_those_of_the_history_without_what_was_taken_back() -> None:
    first: Row = {"step": 0, "policy_version": 0, "loss": None, "time_s": 0.1}
    rows: list[Row] = [{"step": step, "loss": step / 3} for step in range(1, 6)]
    folded = Rows([first, *rows, Rewind(3), {"step": 4, "kl": 2.5}, Rewind(9)])
    assert list(folded) == [first, *rows[:3], {"step": 4, "kl": 2.5}]
    assert folded[-1] == {"step": 4, "kl": 2.5}
    assert folded[1:3] == rows[:2]
    assert len(folded) == 5
    assert isinstance(folded[0]["step"], int)
    assert len(Rows([first, Rewind(-1)])) == 0


def test_folded_rows_are_small() -> None:
    """Those of 100,000 steps are in memory while a scheduler starts."""

    def row(step: int) -> Row:
        return {"step": step} | {f"key/{n}": step + n / 7 for n in range(60)}

    tracemalloc.start()
    rows = Rows(map(row, range(2000)))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(rows) == 2000
    assert held < 2_000_000  # as dictionaries 8 MB


def test_outcomes_and_seconds_of_a_row_are_those_since_the_row_before() -> None:
    log = Log()
    log.apply(LearnerResumed("L", 0, 0, ""))
    log.evaluate(0)
    log.apply(made_settlement("t1", 0))
    log.apply(made_settlement("t1", 1, Outcome.TIMEOUT))
    log.apply(made_settlement("e0.1", 0))
    [row] = log.step(1, loss=2.0, learner_busy_s=1.5, value_loss=3.0)
    assert isinstance(row, dict)
    assert (row["outcome/ok"], row["outcome/timeout"], row["loss"]) == (1, 1, 2.0)
    assert row["idle/credit"] == 4.0 - 1.5
    assert row["value_loss"] == 3.0  # what only some algorithms say


def test_steps_of_a_lineage_that_did_not_survive_make_no_rows() -> None:
    log = Log()
    log.apply(LearnerResumed("L", 0, 0, ""))
    log.evaluate(0)
    log.step(1)
    assert log.apply(LearnerResumed("M", 0, 0, "")) == [Rewind(0)]
    assert log.step(2, lineage="L") == []
    assert steps_of(log.step(1, lineage="M")) == [1]


def test_an_evaluation_without_a_valid_episode_has_no_success_rate() -> None:
    log = Log()
    log.apply(LearnerResumed("L", 0, 0, ""))
    [row] = log.evaluate(0, num_valid=0)
    assert isinstance(row, dict)
    assert row["eval/success_rate"] is None
    assert row["eval/reward_mean"] is None


def test_an_evaluation_gives_its_row_the_means_of_every_tag() -> None:
    log = Log()
    log.apply(LearnerResumed("L", 0, 0, ""))
    log.evaluate(0)
    log.step(1)
    log.step(2)
    log.apply(EvaluationStarted("e2", 2, 12, 9))
    tags = {"lake": TagEvaluation(0.75, 0.5, 4), "shop": TagEvaluation(0.0, 0.0, 0)}
    greedy = {"lake": TagEvaluation(0.25, 0.125, 4)}
    body = EvaluationFinished("e2", 2, 0.75, 0.5, 4, 9, tags, greedy["lake"], greedy)
    [row] = log.apply(body)
    assert isinstance(row, dict)
    assert (row["eval/greedy/success_rate"], row["eval/greedy/reward_mean"]) == (0.25, 0.125)
    assert row["eval/greedy/tag/lake/success_rate"] == 0.25
    assert (row["eval/success_rate"], row["eval/reward_mean"]) == (0.75, 0.5)
    assert {key: value for key, value in row.items() if key.startswith("eval/tag/")} == {
        "eval/tag/lake/success_rate": 0.75,
        "eval/tag/lake/reward_mean": 0.5,
        "eval/tag/shop/success_rate": None,
        "eval/tag/shop/reward_mean": None,
    }


def test_a_result_that_an_older_scheduler_wrote_has_no_tags() -> None:
    line = (
        b'{"type":"evaluation_finished","evaluation_id":"e0","step":0,"success_rate":0.5,'
        b'"reward_mean":0.5,"num_valid":4,"num_episodes":4}'
    )
    assert msgspec.json.decode(line, type=EvaluationFinished).tags == {}


def test_the_page_about_runs_says_what_every_number_means() -> None:
    page = (Path(__file__).parents[3] / "docs" / "runs.md").read_text(encoding="utf-8")
    part = page.partition("## Metrics of a step")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.+) \|$", part, re.MULTILINE)
    assert all(len(meaning) > 10 for _, meaning in rows)
    named = [name for keys, _ in rows for name in re.findall(r"`([^`]+)`", keys)]
    assert len(set(named)) == len(named)
    assert set(METRIC_KEYS) <= set(named)
    fixed = {name for name in named if name.startswith(("idle/", "busy/", "outcome/"))}
    assert fixed <= set(METRIC_KEYS)


def test_time_between_two_starts_of_a_run_is_nobodys_idle_time() -> None:
    log = Log()
    log.apply(LearnerResumed("L", 0, 0, ""))
    log.evaluate(0)
    log.apply(LearnerResumed("L", 0, 0, ""))  # one second after the row
    log.now_s += 3600.0  # the run is stopped
    log.log.begin_again(log.now_s)
    [row] = log.step(1)
    assert isinstance(row, dict)
    assert (row["idle/credit"], row["time_s"]) == (2.0, 3604.0)
    [row] = [row for row in log.step(2) + log.evaluate(2) if isinstance(row, dict)]
    assert row["idle/credit"] == 1.0
