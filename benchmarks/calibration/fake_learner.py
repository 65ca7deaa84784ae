"""Learner of the calibration: takes groups as the real one, sleeps for as long as training would take.

Its seconds for a group are those of the simulated learner. It counts what the simulator counts.
"""

import asyncio
import time
import uuid

import numpy as np

from benchmarks.calibration.plans import PlanBook
from tailrace.bus import Bus
from tailrace.config import RunConfig
from tailrace.store import Outbox, StoreConnection, TrajectoryBuffer
from tailrace.weights import TensorBytes, WeightPublisher
from tailrace_cli.simulation.measures import Tally, Tokens
from tailrace_cli.simulation.workload import natural_tokens
from tailrace_protos.event import CheckpointSaved, LearnerResumed, ModelPrepared, StepFinished
from tailrace_protos.trajectory import Trajectory, TrajectoryGroup
from tailrace_scheduler.core.streams.settings import EngineModel

BLOCK_S = 1.0


class FakeLearner:
    """Learner of one run. `rho`: its time for a group as a share of the engines' least time."""

    def __init__(
        self,
        bus: Bus,
        store: StoreConnection,
        run: RunConfig,
        *,
        plans: PlanBook,
        model: EngineModel,
        rho: float,
        num_servers: int,
    ) -> None:
        self._run = run
        self._buffer = TrajectoryBuffer(store, run.exp_name)
        self._outbox = Outbox(store, run.exp_name)
        self._publisher = WeightPublisher(bus, run.exp_name, "calibration")
        self._plans = plans
        self._model = model
        self._rho = rho
        self._num_servers = num_servers
        self._lineage = uuid.uuid4().hex[:8]
        self.step = 0
        self.tally = Tally()
        self.cut: list[str] = []  # episodes without a trajectory, of trained groups
        self.step_ends_s: list[float] = []  # unix

    async def begin(self) -> None:
        """Announce a model and its first weights."""
        await self._outbox.emit("learner", ModelPrepared(1000, 0, 0.0, None))
        await self._publish()
        resumed = LearnerResumed(self._lineage, 0, 0, "")
        await self._outbox.emit("learner", resumed)

    async def train(self, num_steps: int) -> None:
        """Do this number of steps."""
        for _ in range(num_steps):
            await self._one_step()

    async def close(self) -> None:
        """Release the weights."""
        await self._publisher.close()

    async def _one_step(self) -> None:
        began_unix_s, missing = time.time(), self._run.groups_per_step
        entries, group_ids = [], []
        trained = self.tally.trained.sampled
        while missing:
            old_step = self._run.old_step(self.step)
            for ready in await self._buffer.next_groups(missing, BLOCK_S, old_step):
                missing -= 1
                entries.append(ready.entry_id)
                group_ids.append(ready.group.group_id)
                took_s = self._rho * self._count(ready.group).work_s(self._model) / self._num_servers
                self.tally.learner_s += took_s
                await asyncio.sleep(took_s)
        self.step += 1
        self.tally.steps += 1
        version = await self._publish()
        now_s = time.time()
        self.step_ends_s.append(now_s)
        trained = self.tally.trained.sampled - trained
        metrics: dict[str, float | None] = {"reward_mean": 0.5, "num_trained_tokens": trained}
        finished = StepFinished(
            self._lineage, self.step, version, tuple(group_ids), 0, began_unix_s, now_s, metrics
        )
        await self._outbox.emit("learner", finished)
        saved = CheckpointSaved(self._lineage, self.step, f"step_{self.step}", len(entries))
        await self._buffer.commit_checkpoint(entries, saved)

    async def _publish(self) -> int:
        weights = np.full(16, self.step, np.float32)
        tensor = TensorBytes("weight", "float32", weights.shape, memoryview(weights.data).cast("B"))
        return await self._publisher.publish([tensor], lineage=self._lineage, optimizer_step=self.step)

    def _count(self, group: TrajectoryGroup) -> Tokens:
        """Add a group to the tally; returns all of its tokens, masked ones too."""
        everything = Tokens()
        for member, trajectory in enumerate(group.members):
            plan = self._plans.of(trajectory.episode_id)
            self.tally.natural += natural_tokens(plan)
            self.tally.num_natural += 1
            if not trajectory.outcome.is_valid:
                self.cut.append(f"{group.group_id}.{member}")
                continue
            whole = self._count_episode(trajectory)
            everything.add(whole)
            self.tally.lengths += natural_tokens(plan)
            self.tally.num_lengths += 1
        began_s = min((one.started_unix_s for one in group.members if one.rows), default=time.time())
        ended_s = max((one.finished_unix_s for one in group.members), default=began_s)
        self.tally.latencies_s.append(ended_s - began_s)
        return everything

    def _count_episode(self, trajectory: Trajectory) -> Tokens:
        (row,) = trajectory.rows
        places = np.flatnonzero(np.frombuffer(row.loss_mask, np.uint8))  # = lengths of their contexts
        versions = np.repeat(
            [span.policy_version for span in row.spans], [span.num_tokens for span in row.spans]
        )
        ages = self.step + 1 - versions  # the first version is 1, after step 0
        prefilled = len(row.loss_mask) - len(places)
        whole = Tokens(len(places), float(places.sum()), prefilled)
        is_kept = ages <= self._run.max_staleness
        kept = Tokens(
            int(is_kept.sum()), float(places[is_kept].sum()), prefilled if is_kept.any() else 0
        )
        self.tally.trained.add(kept)
        self.tally.useful.add(kept)  # nobody knows which of them were sampled in the measured window
        self.tally.masked += whole.sampled - kept.sampled
        for age, count in zip(*np.unique(ages, return_counts=True), strict=True):
            self.tally.ages[int(age)] = self.tally.ages.get(int(age), 0.0) + int(count)
        return whole
