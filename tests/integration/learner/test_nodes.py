"""A learner on two nodes, as two processes of this machine: its steps, a lost node, a stop."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tailrace_protos.event import CheckpointSaved, LearnerResumed, StepFinished, WarmStartAdvanced
from tests.integration.learner.conftest import LearnerRun
from tests.integration.learner.test_process import WARM_START, feed, trained_once
from tests.integration.learner.test_ranks import (
    TWO_RANKS,
    alone,
    as_it_is,
    assert_same_weights,
    saved_after,
)
from tests.world.learner_nodes import node_environment, stop_at_once
from tests.world.processes import ServiceProcess, kill_all
from tests.world.servers import free_port

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]

NODES = ("learner-0", "learner-1")
ENDS_WITHIN_S = 90.0


def start_nodes(
    run: LearnerRun, names: Sequence[str] = NODES, port: int = 0, config: str = "experiment.yaml"
) -> int:
    """Start the learner's process of each node as its pod does; returns the port of the first."""
    port = port or free_port()
    for name in names:
        process = ServiceProcess(
            "learner",
            run.folder / config,
            run.env | node_environment(f"run-{name}", port) | {"TAILRACE_LOG": "json"},
            run.folder / f"{name}.log",
            ("--instance-id", f"run-{name}"),
        )
        process.start()
        run.processes[name] = process
    return port


def stop_nodes(run: LearnerRun) -> list[int]:
    """SIGTERM to all at once; returns their exit codes."""
    return stop_at_once([run.processes[name] for name in NODES], ENDS_WITHIN_S)


def kill_node(run: LearnerRun, name: str) -> None:
    """SIGKILL to the node's process and its rank, as the end of its pod does."""
    ranks = psutil.Process(run.processes[name].running.pid).children()
    run.kill(name)
    kill_all(ranks)


async def next_start(run: LearnerRun, before: Sequence[LearnerResumed]) -> LearnerResumed:
    """The first start of a lineage that is none of those before."""
    known = {body.lineage for body in before}
    resumed: LearnerResumed = await run.until(LearnerResumed, lambda body: body.lineage not in known)
    return resumed


async def finished(run: LearnerRun, step: int) -> None:
    await run.until(StepFinished, lambda body: body.step == step)


async def test_two_nodes_make_the_losses_and_weights_of_one_rank(learner_run: LearnerRun) -> None:
    run = learner_run
    settings: dict[str, Any] = {"warm_start": WARM_START, "num_mini_batches": 2}
    run.configure(strategy_args=TWO_RANKS, **settings)
    run.start("weight_sync")
    start_nodes(run)
    first = await run.until(LearnerResumed)
    group_ids = []
    for indexes in (range(4), range(4, 8)):
        group_ids += await feed(run, indexes)
        saved = await saved_after(run, indexes.stop // 2)
    assert await trained_once(run) == {
        group_id: index // 2 + 1 for index, group_id in enumerate(group_ids)
    }
    book = await run.versions.all()
    assert [book[body.policy_version] for body in run.bodies(StepFinished)] == [
        (first.lineage, step) for step in (1, 2, 3, 4)
    ]
    assert [body.step for body in run.bodies(CheckpointSaved)] == [0, 2, 4]
    assert stop_nodes(run) == [0, 0]
    assert not list((run.run_dir / "checkpoints").glob(".part-*"))

    other = await alone(run, (range(4), range(4, 8)), as_it_is, **settings)
    assert_same_weights(saved.path, other.run_dir / "checkpoints" / "step_4")
    losses, expected = (
        [body.metrics["loss"] for body in of.bodies(StepFinished)] for of in (run, other)
    )
    assert len(losses) == 4
    assert losses == pytest.approx(expected, rel=1e-5, abs=1e-5)


LOSSES = (("learner-0", False), ("learner-1", True))


async def test_a_lost_node_ends_the_other_and_both_go_on(learner_run: LearnerRun) -> None:
    """Also while no group comes: the learner would take the next one with half of its ranks.

    Each node is lost once: the first comes back later, the second at once.
    """
    run = learner_run
    run.configure(strategy_args=TWO_RANKS, max_steps=100)
    run.start("weight_sync")
    port = start_nodes(run)
    resumed = [await run.until(LearnerResumed)]
    group_ids = await feed(run, range(4))
    await saved_after(run, 2)
    for step, (lost, at_once) in zip((2, 4), LOSSES, strict=True):
        kill_node(run, lost)
        (other,) = set(NODES) - {lost}
        if at_once:  # it finds the agent of the first node that it had before
            start_nodes(run, [lost], port)
            assert run.ended(lost, ENDS_WITHIN_S) == 1
        assert run.ended(other, ENDS_WITHIN_S) == 1
        start_nodes(run, NODES, port)
        resumed.append(await next_start(run, resumed))
        group_ids += await feed(run, range(2 * step, 2 * step + 4))
        await saved_after(run, step + 2)
    assert [body.step for body in resumed] == [0, 2, 4]
    assert await trained_once(run) == {
        group_id: index // 2 + 1 for index, group_id in enumerate(group_ids)
    }
    assert stop_nodes(run) == [0, 0]


async def test_nodes_with_different_experiments_do_not_train(learner_run: LearnerRun) -> None:
    """An upgrade of the chart changes the experiment of one pod after the other."""
    run = learner_run
    run.configure(strategy_args=TWO_RANKS, training_args={"learning_rate": 0.5})
    before = (run.folder / "experiment.yaml").rename(run.folder / "before.yaml")
    run.configure(strategy_args=TWO_RANKS)
    port = start_nodes(run, NODES[1:], config=before.name)
    start_nodes(run, NODES[:1], port)
    assert [run.ended(name, ENDS_WITHIN_S) for name in NODES] == [1, 1]
    assert "different experiments" in run.log_of(NODES[0])

    run.start("weight_sync")
    start_nodes(run, NODES, port)
    await run.until(LearnerResumed)
    assert stop_nodes(run) == [0, 0]


async def test_a_stop_saves_the_step_that_both_nodes_have_reached(learner_run: LearnerRun) -> None:
    """A stop of one node, of the other, and of both.

    After a stop of one the other ends in failure, as its supervisor must start it again.
    """
    run = learner_run
    run.configure(strategy_args=TWO_RANKS, max_steps=100, save_steps=100)
    run.start("weight_sync")
    port = start_nodes(run)
    resumed = [await run.until(LearnerResumed)]
    for step, stopped in zip((3, 6), NODES, strict=True):
        await feed(run, range(2 * step - 6, 2 * step))
        await finished(run, step)
        run.processes[stopped].running.send_signal(signal.SIGTERM)
        (other,) = set(NODES) - {stopped}
        assert [run.ended(name, ENDS_WITHIN_S) for name in (stopped, other)] == [0, 1]
        *_, begin = [
            line for line in run.log_of(other).splitlines() if "waits for the other nodes" in line
        ]
        assert (json.loads(begin)["run"], json.loads(begin)["service"]) == (run.name, "learner")
        await saved_after(run, step)
        assert is_saved(run, step)
        start_nodes(run, NODES, port)
        resumed.append(await next_start(run, resumed))
    assert [body.step for body in resumed] == [0, 3, 6]
    await feed(run, range(12, 18))
    await finished(run, 9)
    assert stop_nodes(run) == [0, 0]
    assert is_saved(run, 9)


def is_saved(run: LearnerRun, step: int) -> bool:
    return (Path(run.run_dir) / "checkpoints" / f"step_{step}" / "run_state.json").exists()


async def test_a_stop_of_one_node_ends_the_warm_start(learner_run: LearnerRun) -> None:
    run = learner_run
    run.configure(strategy_args=TWO_RANKS, warm_start={**WARM_START, "num_steps": 5_000})
    start_nodes(run)
    await run.until(WarmStartAdvanced)
    run.processes["learner-1"].running.send_signal(signal.SIGTERM)
    assert [run.ended(name, ENDS_WITHIN_S) for name in ("learner-1", "learner-0")] == [0, 1]
