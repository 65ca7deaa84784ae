"""Real agents and a real gateway over one run, with a scripted model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import redis.asyncio

from tailrace_protos.base import as_int32
from tailrace_protos.episode import EpisodeTask
from tailrace_protos.trajectory import TokenRow, Trajectory
from tests.world.agents import AgentsWorld, agents_world
from tests.world.gateway import GatewayWorld, start_model
from tests.world.run import RunWorld
from tests.world.scripted_model import ScriptedModel
from tests.world.servers import ServerProcess

ROWS = [{"prompt": "Say hello.", "answer": "hello"}, {"prompt": "Say more.", "answer": "more"}]


@dataclass
class WorkflowWorld:
    """The agents and the gateway of one run."""

    agents: AgentsWorld
    gateway: GatewayWorld
    model: ScriptedModel
    folder: Path

    def write_rows(self, rows: Sequence[dict[str, Any]]) -> Path:
        path = self.folder / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return path

    async def start(self, agent: str, rows: Sequence[dict[str, Any]] = ROWS, **workflow: Any) -> None:
        """Agents whose rows `agent` plays, and a gateway."""
        await self.gateway.start_gateway()
        await self.agents.start_agents(**self.settings(agent, rows, **workflow))

    def settings(
        self, agent: str, rows: Sequence[dict[str, Any]] = ROWS, **workflow: Any
    ) -> dict[str, Any]:
        """The `agents` section."""
        return {
            "custom_envs": {},
            "datasets": {"rows": {"path": str(self.write_rows(rows))}},
            "workflow": {"agent": agent, **workflow},
        }

    async def admit(self, num_groups: int = 1, group_size: int = 1, **more: Any) -> list[EpisodeTask]:
        return await self.agents.admit(num_groups, group_size, env_name="rows", **more)

    async def play(self, num_groups: int = 1, group_size: int = 1) -> dict[str, Trajectory]:
        """Admit groups and return their trajectories; each needs one valid member."""
        await self.admit(num_groups, group_size)
        return await self.agents.trajectories(num_groups)

    def sampled(self) -> list[list[int]]:
        """Tokens that the engine emitted, call by call."""
        return [self.model._ids(request)[: request.max_new_tokens] for request in self.model.requests]

    async def session_keys(self) -> list[bytes]:
        """Redis keys of sessions of this run."""
        client = redis.asyncio.from_url(self.agents.redis_server.url)
        try:
            return [key async for key in client.scan_iter(f"{{{self.agents.run}}}:session*")]
        finally:
            await client.aclose()


def trained(row: TokenRow) -> list[int]:
    """The ids that a row trains."""
    mask = np.frombuffer(row.loss_mask, np.uint8).astype(bool)
    ids: list[int] = as_int32(row.token_ids)[mask].tolist()
    return ids


@asynccontextmanager
async def workflow_world(
    nats: ServerProcess,
    redis_server: ServerProcess,
    run: str,
    folder: Path,
    *,
    real_rewards: bool = False,
) -> AsyncIterator[WorkflowWorld]:
    """A run with its streams, scheduler, rewards and inference server; no agents and no gateway yet."""
    async with (
        agents_world(nats, redis_server, run, folder, real_rewards=real_rewards) as agents,
        start_model(agents) as model,
    ):
        shared = {one.name: getattr(agents, one.name) for one in fields(RunWorld)}
        gateway = GatewayWorld(**shared, model=model)
        yield WorkflowWorld(agents, gateway, model, folder)
