"""Groups that wait for the learner, through checkpoints, crashes and drops."""

from __future__ import annotations

from tailrace_protos.event import (
    CheckpointSaved,
    GroupClosed,
    GroupDropped,
    LearnerResumed,
    StepFinished,
    WeightsPublished,
)
from tailrace_scheduler.core.lineage import Lineage


def made_lineage(*group_ids: str) -> Lineage:
    lineage = Lineage()
    lineage.resumed(LearnerResumed("L", 0, 0, ""))
    for group_id in group_ids:
        lineage.closed(GroupClosed(group_id, "train", 2, 2, True, 10))
    return lineage


def made_step(step: int, *group_ids: str, lineage: str = "L") -> StepFinished:
    return StepFinished(lineage, step, step, group_ids, 0, 0.0, 0.0, {})


def test_a_crash_returns_the_groups_since_the_checkpoint_to_the_learner() -> None:
    lineage = made_lineage("a", "b", "c", "d")
    lineage.stepped(made_step(1, "a"))
    lineage.saved(CheckpointSaved("L", 1, "p", 1))
    lineage.stepped(made_step(2, "b", "c"))
    assert (lineage.step, lineage.num_ready, list(lineage.waiting.sizes.values())) == (2, 1, [10])
    lineage.resumed(LearnerResumed("M", 1, 0, "step_1"))
    assert (lineage.step, lineage.num_ready, list(lineage.waiting.sizes.values())) == (1, 3, [10] * 3)
    assert lineage.checkpoint_step == 1


def test_a_resume_from_an_older_checkpoint_does_not_wait_for_groups_that_are_gone() -> None:
    lineage = made_lineage("a", "b", "c")
    lineage.stepped(made_step(1, "a"))
    lineage.stepped(made_step(2, "b"))
    lineage.saved(CheckpointSaved("L", 2, "p", 2))
    lineage.resumed(LearnerResumed("M", 0, 0, ""))
    assert lineage.num_ready == 1


def test_a_dropped_group_returns_its_credit() -> None:
    lineage = made_lineage("a", "b")
    lineage.dropped(GroupDropped("a", "stale"))
    assert lineage.num_ready == 1


def test_steps_and_checkpoints_of_another_lineage_do_not_count() -> None:
    lineage = made_lineage("a")
    assert not lineage.stepped(made_step(5, "a", lineage="dead"))
    assert not lineage.saved(CheckpointSaved("dead", 5, "p", 1))
    assert (lineage.step, lineage.num_ready, lineage.checkpoint_step) == (0, 1, -1)


def test_a_group_that_was_not_sent_never_waits() -> None:
    lineage = made_lineage()
    lineage.closed(GroupClosed("a", "train", 1, 2, False, 0))
    assert lineage.num_ready == 0


def test_the_version_of_a_resumed_step_is_the_one_it_was_published_under_again() -> None:
    lineage = made_lineage()
    lineage.published(WeightsPublished(0, "L", 0, 1))
    assert lineage.policy_version == 0
    lineage.resumed(LearnerResumed("M", 0, 0, ""))
    assert lineage.policy_version == -1
    lineage.published(WeightsPublished(7, "M", 0, 1))
    assert lineage.policy_version == 7
    assert lineage.newest_version == 7


def test_versions_on_new_servers_begin_anew() -> None:
    lineage = made_lineage()
    lineage.published(WeightsPublished(21, "L", 20, 1))
    lineage.resumed(LearnerResumed("M", 20, 0, "step_20"))
    assert lineage.newest_version == 21
    lineage.published(WeightsPublished(1, "M", 20, 1))
    lineage.published(WeightsPublished(22, "L", 21, 1))  # of the learner that is gone
    assert lineage.newest_version == 1
