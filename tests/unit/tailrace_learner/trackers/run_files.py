"""Files of a run as the scheduler writes them, for the tests of trackers."""

from __future__ import annotations

import json
from pathlib import Path

from tailrace_learner.ports import MetricsRow
from tailrace_protos.event import (
    EvaluationFinished,
    EvaluationStarted,
    Event,
    EventBody,
    LearnerResumed,
    StepFinished,
    TagEvaluation,
)
from tailrace_scheduler.adapters.run_files import EventFile, MetricsFile
from tailrace_scheduler.core.run_log import Rewind, RunLog


class RunFiles:
    """Files that the scheduler writes for a run with an evaluation at every step."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.events, self.rows = EventFile(run_dir), MetricsFile(run_dir)
        self.log = RunLog(lambda step: True)
        self.num_events = 0

    def happen(self, body: EventBody) -> None:
        self.num_events += 1
        event = Event(f"{self.num_events}-0", 1000.0 + self.num_events, "test", body)
        self.events.append([event])
        for change in self.log.apply(event, lambda wall_s, busy_s: {"idle/credit": wall_s - busy_s}):
            if isinstance(change, Rewind):
                self.rows.rewind(change.step)
            else:
                self.rows.append(change)

    def resume(self, lineage: str, step: int) -> None:
        self.happen(LearnerResumed(lineage, step, 0, ""))

    def step(self, lineage: str, step: int, policy_version: int) -> None:
        tags = {
            "lake": TagEvaluation(0.5, 0.25 * policy_version, 4),
            "shop": TagEvaluation(0.0, 0.0, 0),
        }
        if step:
            numbers = {"loss": 0.5 * policy_version, "kl": None, "tag/lake/reward_mean": 1.0}
            self.happen(StepFinished(lineage, step, policy_version, ("g",), 0, 0.0, 0.0, numbers))
        self.happen(EvaluationStarted(f"e{step}-v{policy_version}", step, policy_version, 8))
        self.happen(EvaluationFinished(f"e{step}-v{policy_version}", step, 0.5, 0.125, 4, 8, tags))

    def first_run(self) -> None:
        """Steps 0 to 3 of a lineage, the versions of which are 10 to 13."""
        self.resume("L", 0)
        for step in range(4):
            self.step("L", step, 10 + step)

    @property
    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """The points of every key of `metrics.jsonl`."""
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return curves_of([json.loads(line) for line in lines])


def curves_of(rows: list[MetricsRow]) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for key, value in row.items():
            if value is not None and key != "step":
                curves.setdefault(key, []).append((int(row["step"] or 0), value))
    return curves
