"""A real learner and a real weight_sync between a real nats-server and a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tailrace.config import Endpoints
from tailrace.store import GroupRecord, Outbox, StoreConnection, TrajectoryBuffer, Versions
from tailrace_protos.base import pack_float32, pack_int32, pack_uint8
from tailrace_protos.episode import EnvTask, Outcome
from tailrace_protos.event import Event
from tailrace_protos.generation import TokenSpan
from tailrace_protos.trajectory import TokenRow, Trajectory
from tests.world.processes import ServiceProcess, environment

GROUP_SIZE = 4
GROUPS_PER_STEP = 2
_DEADLINE_S = 300.0  # for an event: ranks that start import torch, slowly on a busy machine


def experiment(run: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """A tiny run; keys of `changes` with a dot reach into `learner`."""
    content: dict[str, Any] = {
        "exp_name": run,
        "output_dir": str(folder),
        "seed": 5,
        "max_steps": 4,
        "save_steps": 2,
        "group_size": GROUP_SIZE,
        "groups_per_step": GROUPS_PER_STEP,
        "max_staleness": 2,
        "learner": {
            "device": "cpu",
            "tensorboard": False,
            "from_scratch": {
                "model_type": "qwen3",
                "tokenizer": "tailrace_envs.frozen_lake_tokenizer:build_frozen_lake_tokenizer",
                "init_std": 0.1,
                "config": {
                    "hidden_size": 32,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                    "head_dim": 16,
                    "intermediate_size": 48,
                    "tie_word_embeddings": True,
                },
            },
            "training_args": {"learning_rate": 0.01},
        },
    }
    for key, value in changes.items():
        (content["learner"] if key in _LEARNER_KEYS else content)[key] = value
    return content


_LEARNER_KEYS = {
    "adv_estimator",
    "bind_host",
    "critic",
    "drain_s",
    "from_scratch",
    "init_kl_coef",
    "kl_horizon",
    "kl_in",
    "lora",
    "metrics",
    "num_mini_batches",
    "save_trajectories",
    "strategy_args",
    "target_kl",
    "tensorboard",
    "trackers",
    "training_args",
    "wandb",
    "warm_start",
}


@dataclass
class LearnerRun:
    """The processes of one run and a hand in its Redis."""

    name: str
    folder: Path
    env: dict[str, str]
    redis: StoreConnection
    processes: dict[str, ServiceProcess] = field(default_factory=dict)
    read: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.buffer = TrajectoryBuffer(self.redis, self.name)
        self.outbox = Outbox(self.redis, self.name)
        self.versions = Versions(self.redis, self.name)

    @property
    def run_dir(self) -> Path:
        return self.folder / self.name

    def configure(self, **changes: Any) -> None:
        content = experiment(self.name, self.folder, **changes)
        (self.folder / "experiment.yaml").write_text(yaml.safe_dump(content))

    def start(self, service: str) -> None:
        config, log = self.folder / "experiment.yaml", self.folder / f"{service}.log"
        self.processes[service] = ServiceProcess(service, config, self.env, log)
        self.processes[service].start()

    def kill(self, service: str) -> None:
        self.processes.pop(service).kill()

    def stop(self, service: str) -> int:
        return self.processes.pop(service).stop()

    def ended(self, service: str, timeout_s: float) -> int:
        """Wait for the end; returns the exit code."""
        return self.processes.pop(service).ended(timeout_s)

    def log_of(self, service: str) -> str:
        return (self.folder / f"{service}.log").read_text()

    async def put_group(
        self, index: int, change: Callable[[Trajectory], Trajectory] = lambda member: member
    ) -> str:
        """A closed group whose tokens came from the newest version; half of its members succeed.

        `change` is made to every member.
        """
        group_id = f"t{index:08d}"
        tasks = tuple(EnvTask("lake", index) for _ in range(GROUP_SIZE))
        record = GroupRecord(
            group_id=group_id,
            group_index=index,
            phase="train",
            tasks=tasks,
            deadline_unix_s=4e9,
            min_valid=2,
            step=0,
        )
        await self.buffer.record_group(record)
        version = max(await self.versions.all(), default=1)
        for member in range(GROUP_SIZE):
            await self.buffer.put_trajectory(change(_trajectory(record, member, version)))
        return group_id

    async def until(self, kind: type[Any], found: Callable[[Any], bool] = lambda body: True) -> Any:
        """The first event of a kind that is as wanted, from the outbox, in order."""
        async with asyncio.timeout(_DEADLINE_S):
            while True:
                for event in list(self.read):
                    if isinstance(event.body, kind) and found(event.body):
                        return event.body
                self._check_alive()
                events = await self.outbox.read(100, 0.2)
                self.read += events
                await self.outbox.ack([event.seq for event in events])

    def bodies(self, kind: type[Any]) -> list[Any]:
        return [event.body for event in self.read if isinstance(event.body, kind)]

    def _check_alive(self) -> None:
        for service, process in self.processes.items():
            assert process.running.poll() is None, f"{service} ended: {self.log_of(service)[-2000:]}"


def _trajectory(record: GroupRecord, member: int, version: int) -> Trajectory:
    rng = np.random.default_rng(record.group_index * 100 + member)
    mask = np.array([0, 0, 0, 1, 1] * 3, dtype=np.uint8)
    return Trajectory(
        episode_id=record.episode_id(member),
        group_id=record.group_id,
        member=member,
        attempt=0,
        phase="train",
        task=record.tasks[member],
        outcome=Outcome.OK,
        reason="",
        reward=float(member % 2),
        metrics={"success": float(member % 2)},
        started_unix_s=0.0,
        finished_unix_s=1.0,
        rows=(
            TokenRow(
                token_ids=pack_int32(rng.integers(6, 90, len(mask))),
                loss_mask=pack_uint8(mask),
                inference_logprobs=pack_float32(np.where(mask, -4.0, 0.0)),
                spans=(TokenSpan(version, "", int(mask.sum())),),
                turn_ends=pack_int32([5, 10, 15]),
                turn_rewards=pack_float32([0.0, 0.0, float(member % 2)]),
                reward=float(member % 2),
            ),
        ),
    )


@pytest.fixture
async def learner_run(
    endpoints: Endpoints, redis: StoreConnection, run_name: str, tmp_path: Path
) -> AsyncIterator[LearnerRun]:
    run = LearnerRun(run_name, tmp_path, environment(endpoints, tmp_path), redis)
    run.configure()
    yield run
    for process in run.processes.values():
        process.kill()
    remove_segments(run_name)


def remove_segments(run: str) -> None:
    """Delete the shared memory that killed processes left."""
    for segment in _segments(run):
        segment.unlink()


def _segments(run: str) -> Iterator[Path]:
    return Path("/dev/shm").glob(f"tailrace.{run}*")  # a second run of a test has a longer name
