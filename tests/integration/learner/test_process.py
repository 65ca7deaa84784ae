"""The learner's process: start order, steps, checkpoints, `kill -9`, resuming, user mistakes."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from safetensors import safe_open
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from tailrace.config import Endpoints
from tailrace.store import Blobs, connect
from tailrace_protos.event import (
    CheckpointSaved,
    LearnerResumed,
    ModelPrepared,
    StepFinished,
    WarmStartAdvanced,
)
from tailrace_protos.trajectory import Trajectory
from tailrace_scheduler.adapters.run_files import EventFile, MetricsFile
from tests.audit import build_ledger
from tests.integration.learner.conftest import LearnerRun, experiment, remove_segments
from tests.world.processes import environment
from tests.world.servers import make_nats_server, make_redis_server

WARM_START = {
    "demonstrations": "tailrace_envs.frozen_lake_expert:demonstrations",
    "num_steps": 3,
    "batch_size": 8,
    "options": {"size": 4},
}


async def feed(
    run: LearnerRun,
    indexes: range,
    change: Callable[[Trajectory], Trajectory] = lambda member: member,
) -> list[str]:
    return [await run.put_group(index, change) for index in indexes]


async def trained_once(run: LearnerRun) -> dict[str, int]:
    """group -> step on the surviving path; asserts that no group is in it twice."""
    steps: dict[int, tuple[str, ...]] = {}
    for event in run.read:
        if isinstance(event.body, LearnerResumed):
            steps = {step: ids for step, ids in steps.items() if step <= event.body.step}
        if isinstance(event.body, StepFinished):
            steps[event.body.step] = event.body.group_ids
    flat = [(group_id, step) for step, ids in steps.items() for group_id in ids]
    assert len(flat) == len(dict(flat))
    return dict(flat)


def users_algorithms(run: LearnerRun, folder: Path) -> dict[str, Any]:
    """Settings with the optimizer and the metric of the page, in a user's folder."""
    page = (Path(__file__).parents[3] / "docs" / "own_algorithm.md").read_text()
    for name in ("my_optimizers", "my_metrics"):
        (code,) = re.findall(rf"```python\n(# {name}\.py\n.*?)```", page, re.DOTALL)
        (folder / f"{name}.py").write_text(code)
    run.env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), run.env.get("PYTHONPATH")]))
    own = {"optimizer": "my_optimizers:MOMENTUM", "optimizer_args": {"beta": 0.8}}
    return {"training_args": own, "metrics": ["my_metrics:LENGTHS"]}


async def test_a_run_from_warm_start_to_the_last_checkpoint(
    learner_run: LearnerRun, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = learner_run
    own = users_algorithms(run, tmp_path_factory.mktemp("users"))
    run.configure(
        warm_start=WARM_START, save_trajectories=True, tensorboard=True, num_mini_batches=2, **own
    )
    run.start("weight_sync")
    run.start("learner")
    resumed = await run.until(LearnerResumed)
    assert (resumed.step, resumed.next_group_index, resumed.checkpoint) == (0, 0, "")
    prepared = run.bodies(ModelPrepared)[0]
    assert prepared.warm_start_steps == 3
    assert prepared.num_parameters > 0
    advanced = sorted((body.step, body.num_steps) for body in run.bodies(WarmStartAdvanced))
    assert advanced == [(1, 3), (2, 3), (3, 3)]
    card = await Blobs(run.redis, run.name).get_model_card()
    assert card is not None
    assert "tokenizer.json" in card.tokenizer_files
    await run.until(CheckpointSaved, lambda body: body.step == 0)

    group_ids = await feed(run, range(8))
    saved = await run.until(CheckpointSaved, lambda body: body.step == 4)
    assert [body.step for body in run.bodies(StepFinished)] == [1, 2, 3, 4]
    assert list(await trained_once(run)) == group_ids
    versions = [body.policy_version for body in run.bodies(StepFinished)]
    assert versions == sorted(set(versions))
    book = await run.versions.all()
    assert [book[version] for version in versions] == [(resumed.lineage, step) for step in (1, 2, 3, 4)]
    assert (await run.buffer.counters()).retained_groups == 0
    for step in run.bodies(StepFinished)[:2]:  # later on the groups are stale
        assert (step.metrics["row_tokens_max"], step.metrics["best_reward"]) == (6.0, 1.0)
    AutoModelForCausalLM.from_pretrained(saved.path)
    with safe_open(Path(saved.path) / "optimizer.safetensors", framework="pt") as moments:
        assert moments.metadata()["optimizer"] == "my_optimizers:MOMENTUM"
        assert any(name.endswith(".momentum_buffer") for name in moments.keys())  # noqa: SIM118
    assert len(list((run.run_dir / "trajectories").glob("*.msgpack"))) == 4
    EventFile(run.run_dir).append(run.read)  # what the scheduler would write
    MetricsFile(run.run_dir).append({"step": 4, "policy_version": 4, "time_s": 1.0, "loss": 0.5})
    assert run.stop("learner") == 0
    shown = EventAccumulator(str(run.run_dir / "tensorboard")).Reload()
    assert [(point.step, point.value) for point in shown.Scalars("loss")] == [(4, 0.5)]


async def test_a_killed_learner_goes_on_from_its_checkpoint_and_replays_what_came_after(
    learner_run: LearnerRun,
) -> None:
    run = learner_run
    run.start("weight_sync")
    run.start("learner")
    first = await run.until(LearnerResumed)
    group_ids = await feed(run, range(6))
    await run.until(StepFinished, lambda body: body.step == 3)
    await run.until(CheckpointSaved, lambda body: body.step == 2)  # written while step 3 was trained
    run.kill("learner")
    assert (await run.buffer.counters()).retained_groups == 2

    run.start("learner")
    again = await run.until(LearnerResumed, lambda body: body.lineage != first.lineage)
    assert (again.step, again.next_group_index) == (2, 6)
    assert again.checkpoint.endswith("step_2")
    assert again.lineage.startswith("2-")
    group_ids += await feed(run, range(6, 8))
    await run.until(CheckpointSaved, lambda body: body.step == 4)
    assert await trained_once(run) == {
        group_id: index // 2 + 1 for index, group_id in enumerate(group_ids)
    }
    book = await run.versions.all()
    assert sorted(book) == list(range(min(book), min(book) + len(book)))
    assert (await run.buffer.counters()).accepted_groups == 8
    assert len(run.bodies(ModelPrepared)) == 1


async def one_step_of(run: LearnerRun) -> CheckpointSaved:
    """A run that ended after a step, and its checkpoint."""
    run.configure(max_steps=1)
    run.start("weight_sync")
    run.start("learner")
    await run.until(LearnerResumed)
    await feed(run, range(2))
    saved = await run.until(CheckpointSaved, lambda body: body.step == 1)
    assert run.stop("learner") == 0
    run.kill("weight_sync")
    return saved


async def test_a_stopped_learner_saves_and_goes_on_there(
    learner_run: LearnerRun,
) -> None:
    run = learner_run
    run.configure(max_steps=9, save_steps=0, drain_s=60.0)
    run.start("weight_sync")
    run.start("learner")
    await run.until(CheckpointSaved, lambda body: body.step == 0)
    group_ids = await feed(run, range(3))  # a step, and half of the next one
    await run.until(StepFinished)
    assert run.stop("learner") == 0
    saved = await run.until(CheckpointSaved, lambda body: body.step == 1)
    assert saved.num_groups == 2
    run.configure(max_steps=9, save_steps=0, drain_s=50.0)
    run.start("learner")
    resumed = await run.until(LearnerResumed, lambda body: body.step == 1)
    assert resumed.checkpoint == saved.path
    group_ids += await feed(run, range(3, 4))
    await run.until(StepFinished, lambda body: body.step == 2)
    assert await trained_once(run) == dict(zip(group_ids, (1, 1, 2, 2), strict=True))
    assert "['learner.drain_s']" in run.log_of("learner").replace('"', "'")
    assert run.stop("learner") == 0
    await run.until(CheckpointSaved, lambda body: body.step == 2)


@pytest.mark.parametrize("is_redis_gone", [False, True])
async def test_a_learner_stopped_in_a_publication_without_nats_saves_and_goes_on_there(
    run_name: str, tmp_path: Path, *, is_redis_gone: bool
) -> None:
    """Every step is told once: before the end, or, if Redis is gone too, by the next learner."""
    (tmp_path / "nats").mkdir()
    (tmp_path / "redis").mkdir()
    nats, redis = make_nats_server(tmp_path / "nats"), make_redis_server(tmp_path / "redis")
    async with AsyncExitStack() as stack:
        stack.callback(remove_segments, run_name)
        for server in (nats, redis):
            stack.callback(server.kill)
            server.start()
        connection = await connect(redis.url)
        stack.push_async_callback(connection.aclose)
        endpoints = Endpoints(nats_url=nats.url, redis_url=redis.url, host_id="this-host")
        run = LearnerRun(run_name, tmp_path, environment(endpoints, tmp_path), connection)
        run.configure(max_steps=9, save_steps=0, drain_s=8.0, save_trajectories=True)
        for service in ("weight_sync", "learner"):
            run.start(service)
            stack.callback(run.processes[service].kill)
        await run.until(LearnerResumed)
        group_ids = await feed(run, range(2))
        await run.until(StepFinished)
        nats.kill()
        group_ids += await feed(run, range(2, 4))
        trained = run.run_dir / "trajectories"
        async with asyncio.timeout(100):
            while not list(trained.glob("step_000002-*")):  # and then its weights are offered
                await asyncio.sleep(0.02)
        if is_redis_gone:
            redis.kill()
        assert run.stop("learner") == 0

        for server in (nats, *([redis] if is_redis_gone else [])):
            server.start()
        run.start("learner")
        stack.callback(run.processes["learner"].kill)
        await run.until(LearnerResumed, lambda body: body.step == 2)
        group_ids += await feed(run, range(4, 6))
        await run.until(StepFinished, lambda body: body.step == 3)
        told = [(body.step, body.policy_version >= 0) for body in run.bodies(StepFinished)]
        assert told == [(1, True), (2, False), (3, True)]
        assert await trained_once(run) == dict(zip(group_ids, (1, 1, 2, 2, 3, 3), strict=True))
        EventFile(run.run_dir).append(run.read)
        ledger = build_ledger(run.run_dir)
        assert (ledger.last_step, ledger.trained_twice) == (3, [])


async def test_a_new_run_continues_an_old_one_when_asked(learner_run: LearnerRun) -> None:
    """And does not train what the checkpoint already holds, if its groups were not released in time."""
    run = learner_run
    saved = await one_step_of(run)

    # A learner that died between writing the checkpoint and releasing its groups: they are still there.
    other = LearnerRun(f"{run.name}x", run.folder, run.env, run.redis)
    group_ids = await feed(other, range(6))
    state_file = Path(saved.path) / "run_state.json"
    state: dict[str, Any] = msgspec.json.decode(state_file.read_bytes())
    assert state["group_ids"] == group_ids[:2]
    state["entry_ids"] = [entry.entry_id for entry in await other.buffer.next_groups(2, 1.0)]
    state_file.write_bytes(msgspec.json.encode(state))
    other.configure(max_steps=3, resume_from_checkpoint=saved.path)
    other.start("weight_sync")
    other.start("learner")
    try:
        resumed = await other.until(LearnerResumed)
        assert (resumed.step, resumed.next_group_index) == (1, 6)
        await other.until(CheckpointSaved, lambda body: body.step == 3)
        assert await trained_once(other) == dict(zip(group_ids[2:], (2, 2, 3, 3), strict=True))
    finally:
        other.kill("learner")
        other.kill("weight_sync")


@pytest.mark.heavy
@pytest.mark.timeout(900)
async def test_a_continued_run_killed_before_its_next_checkpoint_starts_where_it_did(
    learner_run: LearnerRun,
) -> None:
    """Although the run that it continued is gone by then and the setting that named it another one."""
    run = learner_run
    saved = await one_step_of(run)

    other = LearnerRun(f"{run.name}x", run.folder, run.env, run.redis)
    other.configure(max_steps=3, save_steps=10, resume_from_checkpoint=saved.path)
    other.start("weight_sync")
    other.start("learner")
    try:
        first = await other.until(LearnerResumed)
        group_ids = await feed(other, range(2))
        await other.until(StepFinished, lambda body: body.step == 2)
        other.kill("learner")
        shutil.rmtree(saved.path)
        other.configure(max_steps=3, save_steps=10, resume_from_checkpoint=True)
        other.start("learner")
        again = await other.until(LearnerResumed, lambda body: body.lineage != first.lineage)
        assert again.step == 1
        assert again.checkpoint.startswith(str(other.run_dir))
        group_ids += await feed(other, range(2, 4))
        await other.until(CheckpointSaved, lambda body: body.step == 3)
        assert await trained_once(other) == dict(zip(group_ids, (2, 2, 3, 3), strict=True))
        assert (await other.buffer.counters()).retained_groups == 0
    finally:
        other.kill("learner")
        other.kill("weight_sync")


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"from_scratch": None, "pretrain": "/nowhere/model"}, "no model directory"),
    ({"pretrain": "/nowhere/model"}, "either pretrain"),
    ({"resume_from_checkpoint": "/nowhere/step_1"}, "is no checkpoint"),
    ({"resume_from_checkpoint": True}, "no checkpoint in"),
    ({"num_mini_batches": 3}, "num_mini_batches"),
    ({"drain_s": 0}, "drain_s must be positive"),
    ({"warm_start": {**WARM_START, "options": {"colour": "red"}}}, "colour"),
    ({"warm_start": {**WARM_START, "demonstrations": "nowhere:f"}}, "cannot import"),
    ({"metrics": ["nowhere:LENGTHS"]}, "learner.metrics: cannot import"),
    ({"trackers": {"nowhere:Plot": {}}}, "learner.trackers.nowhere:Plot: cannot import"),
    ({"training_args": {"optimizer": "sgd", "optimizer_args": {"momentum": -1.0}}}, "Invalid momentum"),
]

STARTS = """
import sys
from tailrace.runtime import run_service
from tailrace_learner.adapters.process import build
for path in sys.argv[1:]:
    sys.stderr.write(f"exit code {run_service(build, ['--config', path])}\\n")
"""


def test_mistakes_of_the_user_end_with_code_2_and_one_line_that_names_them(
    endpoints: Endpoints, run_name: str, tmp_path: Path
) -> None:
    """One process starts all of them, one after another, since importing torch takes longest."""
    paths = []
    for index, (changes, _) in enumerate(MISTAKES):
        content = experiment(f"{run_name}-{index}", tmp_path, **changes)
        paths.append(tmp_path / f"{index}.yaml")
        paths[-1].write_text(yaml.safe_dump(content))
    env = environment(endpoints, tmp_path)
    argv = [sys.executable, "-c", STARTS, *map(str, paths)]
    told = subprocess.run(
        argv, env=env, capture_output=True, text=True, timeout=200, check=False
    ).stderr
    assert "Traceback" not in told
    lines = [line for line in told.splitlines() if line.startswith(("error: ", "exit code "))]
    assert lines[1::2] == ["exit code 2"] * len(MISTAKES), told
    for (_, words), line in zip(MISTAKES, lines[::2], strict=True):
        assert words in line
