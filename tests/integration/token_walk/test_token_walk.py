"""One token, followed from the engine to the loss through real parts.

The torch engine serves a tiny model over ZMQ, an environment is played by the episode machine, Redis
holds the trajectories, and the learner takes them for a step. `docs/architecture.md` shows the walk.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tailrace.channel import (
    Address,
    ClientChannelConfig,
    ServerChannelConfig,
    ZmqGenerateClient,
    ZmqGenerateServer,
)
from tailrace.policy.activity import Stages
from tailrace.policy.continuation import ContinuingPolicy
from tailrace.store import GroupRecord, StoreConnection, TrajectoryBuffer
from tailrace_agents.core.episode import SamplingPlan
from tailrace_agents.core.settlement import build_trajectory
from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.driver import EngineDriver
from tailrace_inference.engine.engine import TorchEngine
from tailrace_inference.handlers import InferenceHandler
from tailrace_learner.adapters.hf_model import prepared
from tailrace_learner.config import LearnerConfig, TrainingArgs
from tailrace_learner.core.batch.lineage import Ancestry
from tailrace_learner.core.batch.row_builder import TrainingRowBuilder
from tailrace_learner.core.batch.rows import PreparedGroup
from tailrace_learner.core.model import attention
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.core.step.optimizer import SummedOptimizer
from tailrace_learner.core.step.step import StepTrainer
from tailrace_protos.episode import EnvTask, EpisodeTask
from tailrace_protos.generation import SamplingParams
from tests.unit.tailrace.policy.fakes import RoundRobinPlacement
from tests.unit.tailrace_agents.env_world import env_limits, play_env
from tests.unit.tailrace_inference.harness import BASE, weights_of
from tests.world.byte_model import renderer
from tests.world.token_watch import Place, TokenWatch

MODEL: dict[str, Any] = BASE | {"vocab_size": 262, "head_dim": 16}
CHUNK_TOKENS = 8
NUM_NEW, TOKEN = 24, 13  # sampled tokens of an episode, and the one that is followed
RUN = 5  # ids up to the token's own by which it is known; all in one chunk
TASK = EnvTask("one_turn", 1)

# Where the token's number is made: the distribution, and the log-probability of the sampled id in it.
ORIGINS = ("scaled_logprobs", "choose")
# Encoded messages as the network delivers them: decoding makes views of these bytes.
ARRIVALS = ("read_chunk_frame", "AutoPipeline._read")

CARRIERS = [
    "Batch",
    "TokenChunk",
    "TokenBuffer",
    "Generation",
    "LedgerNode",
    "RowBuilder",
    "TokenRow",
    "TrainingRow",
    "PackedBatch",
    "LossInputs",
]


class OneTurn:
    """Rewards any reply to its only observation."""

    def __init__(self, reward: float) -> None:
        self._reward = reward

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        return "hello", {}

    def step(self, action: str, /) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", self._reward, True, False, {}

    def render(self) -> None: ...

    def close(self) -> None: ...


class OneServer(RoundRobinPlacement):
    """Leases the one server at `endpoint`."""

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self._address = Address("s0", zmq_endpoint=endpoint)

    async def lease(
        self,
        episode_id: str,
        context_tokens: int,
        failed_server_id: str = "",
        stay_at: Address | None = None,
    ) -> Address:
        return self._address


def make_model() -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **MODEL)
    return AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[ContinuingPolicy]:
    """The policy of a worker over one inference server."""
    # Without kept prefixes: those hold ids for later turns, which is no way to the loss.
    config = InferenceConfig(
        max_running=8,
        kv_cache_tokens=2048,
        stream_interval_ms=1e6,
        stream_chunk_tokens=CHUNK_TOKENS,
        prefix_cache=False,
    )
    content = json.dumps(MODEL | {"model_type": "qwen3"}).encode()
    engine = TorchEngine.from_config_json(content, config)
    engine.stage(weights_of(make_model()), 0)
    engine.apply()
    driver = EngineDriver(engine, in_thread=False)
    handler = InferenceHandler(driver, lambda: False)
    handler.has_weights = True
    server = ZmqGenerateServer(f"ipc://{folder}/server.sock", ServerChannelConfig())
    await server.start(handler)
    await driver.start()
    client = ZmqGenerateClient(ClientChannelConfig())
    await client.start()
    yield ContinuingPolicy(OneServer(server.endpoint), client, Stages())
    await driver.close()
    await client.close()
    await server.stop()


async def play_group(policy: ContinuingPolicy, buffer: TrajectoryBuffer) -> None:
    """Plays two episodes with different rewards and settles them."""
    record = GroupRecord(
        group_id="g0",
        group_index=0,
        phase="train",
        tasks=(TASK, TASK),
        deadline_unix_s=2e9,
        min_valid=2,
        step=0,
    )
    await buffer.record_group(record)
    for member in range(2):
        task = EpisodeTask(f"g0.{member}", "g0", member, 0, "train", TASK, 2e9)
        policy.begin(task.episode_id)
        result = await play_env(
            OneTurn(float(member)),
            renderer(),
            policy,
            seed=1,
            limits=env_limits(512, NUM_NEW, NUM_NEW, 30.0),
            sampling=SamplingPlan(SamplingParams(), seed=5 + member),
        )
        policy.end(task.episode_id)
        reward = sum(result.transcript.turn_rewards)
        rows = result.transcript.rows(reward)
        await buffer.put_trajectory(build_trajectory(task, result, rows, reward, 0.0, 1.0))


def train(prepared_group: PreparedGroup, config: LearnerConfig) -> None:
    """One step on the group, of a model that is not the one that sampled."""
    attention.register()
    model = make_model()
    for parameter in model.parameters():
        parameter.data.add_(0.01 * torch.randn_like(parameter))
    model.set_attn_implementation(attention.IMPLEMENTATION)
    policy = PolicyModel(
        prepared(model, config), torch.device("cpu"), config.temperature, config.logprob_chunk_tokens
    )
    optimizer = SummedOptimizer.of(policy.parameters, config.training_args)
    trainer = StepTrainer(policy, optimizer, config, groups_per_step=1, max_steps=2)
    trainer.begin(0)
    trainer.add(prepared_group)
    trainer.work()
    trainer.finish()


async def walk(
    folder: Path, redis: StoreConnection, run: str, watch: TokenWatch | None
) -> PreparedGroup:
    """From the engine to the loss; returns what the learner trained."""
    config = LearnerConfig(
        training_args=TrainingArgs(learning_rate=1e-3), device="cpu", min_tokens_per_micro_batch=0
    )
    async with served(folder) as policy:
        with watch or nullcontext():
            buffer = TrajectoryBuffer(redis, run)
            await play_group(policy, buffer)
            (ready,) = await buffer.next_groups(1, 10.0)
            builder = TrainingRowBuilder(config, 4, Ancestry("0-a"))
            group = builder.prepare(ready.group, 0, {0: ("0-a", 0)})
            train(group, config)
    return group


def shown(places: list[Place]) -> str:
    return "\n".join(f"{place.name or 'result'} in {place.function}" for place in places)


async def test_a_token_meets_ten_types_and_is_copied_at_most_ten_times(
    short_folder: Path, redis: StoreConnection, run_name: str
) -> None:
    (_, row) = (await walk(short_folder, redis, f"{run_name}a", None)).rows
    assert len(row.targets) == NUM_NEW
    ids = row.target_ids[TOKEN + 1 - RUN : TOKEN + 1].tolist()
    watch = TokenWatch(float(row.inference_logprobs[TOKEN]), ids)
    (_, again) = (await walk(short_folder, redis, f"{run_name}b", watch)).rows
    assert again.target_ids.tolist() == row.target_ids.tolist()

    assert [kind.__name__ for kind in watch.carriers] == CARRIERS
    assert len(CARRIERS) <= 10

    made = [place for place in watch.places if place.function not in ORIGINS + ARRIVALS]
    assert len(watch.places) - len(made) == len(ORIGINS) + len(ARRIVALS), shown(watch.places)
    assert len(made) <= 10, shown(made)
    # A frame, a trajectory, and the command that brings it to Redis.
    assert sum(place.is_encoded for place in made) == 3, shown(made)
    assert watch.carriers[-1].__name__ == "LossInputs"
