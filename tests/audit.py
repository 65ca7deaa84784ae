"""The audit of a finished run: nothing lost, nothing trained twice, as `events.jsonl` tells it.

Only groups of the surviving lineage count: when a learner resumes at step s, what dead lineages
trained after s has not happened.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

Line = dict[str, Any]


@dataclass
class Ledger:
    """Sums of the events of a run."""

    lines: list[Line]
    admitted: dict[str, Line] = field(default_factory=dict)  # group id -> GroupAdmitted
    settled: Counter[str] = field(default_factory=Counter)  # episode id -> settlements
    closed: dict[str, Line] = field(default_factory=dict)  # group id -> GroupClosed
    dropped: set[str] = field(default_factory=set)  # given back by the learner, never trained
    trained: dict[str, int] = field(default_factory=dict)  # group id -> step, surviving lineage
    trained_twice: list[str] = field(default_factory=list)
    last_step: int = 0

    def of_type(self, kind: str) -> list[Line]:
        """Bodies of all events of one type, in order."""
        return [line["body"] for line in self.lines if line["body"]["type"] == kind]


def read_events(run_dir: Path) -> list[Line]:
    """Every line of `events.jsonl`; a torn line is an error here, for the run has ended."""
    return [msgspec.json.decode(line) for line in (run_dir / "events.jsonl").read_bytes().splitlines()]


def build_ledger(run_dir: Path) -> Ledger:
    """Fold the events of a run into its ledger."""
    ledger = Ledger(read_events(run_dir))
    lineage = ""
    for line in ledger.lines:
        body = line["body"]
        match body["type"]:
            case "group_admitted":
                ledger.admitted[body["group_id"]] = body
            case "episode_settled":
                ledger.settled[body["episode_id"]] += 1
            case "group_closed":
                ledger.closed[body["group_id"]] = body
            case "group_dropped":
                ledger.dropped.add(body["group_id"])
            case "learner_resumed":
                lineage = body["lineage"]
                step = body["step"]
                ledger.last_step = step
                ledger.trained = {group: at for group, at in ledger.trained.items() if at <= step}
            case "step_finished" if body["lineage"] == lineage:
                _count_step(ledger, body)
    return ledger


def _count_step(ledger: Ledger, body: Line) -> None:
    assert body["step"] == ledger.last_step + 1, "steps of a lineage follow one another"
    ledger.last_step = body["step"]
    for group in body["group_ids"]:
        if group in ledger.trained:
            ledger.trained_twice.append(group)
        ledger.trained[group] = body["step"]


def check_ledger(ledger: Ledger) -> None:
    """Assert every accounting rule that must hold at the end of any run, chaotic or not."""
    sequence = [_order(line["seq"]) for line in ledger.lines]
    assert sequence == sorted(set(sequence)), "events are in order, each once"
    assert [episode for episode, times in ledger.settled.items() if times != 1] == []
    assert ledger.trained_twice == []
    for group_id, closed in ledger.closed.items():
        admitted = ledger.admitted[group_id]
        members = [f"{group_id}.{member}" for member in range(admitted["num_members"])]
        missing = [member for member in members if member not in ledger.settled]
        assert missing == [], f"{group_id} closed without {missing}"
        assert closed["num_members"] == admitted["num_members"]
    sent = {group for group, closed in ledger.closed.items() if closed["sent_to_learner"]}
    strangers = set(ledger.trained) - sent
    assert strangers == set(), "only groups that the buffer handed over are trained"
    assert ledger.dropped.isdisjoint(ledger.trained), "a dropped group is not trained"


def _order(seq: str) -> tuple[int, int]:
    milliseconds, _, number = seq.partition("-")
    return int(milliseconds), int(number)
