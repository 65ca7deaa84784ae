"""A small world for episodes: an environment, a policy and a journal that do as told."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.channel.generation import Generation
from tailrace.chat import Renderer
from tailrace.sdk.policy import TurnRequest
from tailrace_agents.ports import EpisodeTakenError
from tailrace_envs.frozen_lake_tokenizer import build_frozen_lake_tokenizer
from tailrace_protos.base import as_int32, encode
from tailrace_protos.generation import (
    FinishReason,
    SamplingParams,
)
from tailrace_protos.journal import JournalRecord, decode_record
from tailrace_protos.weights import ModelCard
from tests.unit.tailrace.policy.fakes import generation


@cache
def model_card() -> ModelCard:
    """The card of a model that plays FrozenLake."""
    with tempfile.TemporaryDirectory() as folder:
        build_frozen_lake_tokenizer(folder)
        return ModelCard(b"{}", {path.name: path.read_bytes() for path in Path(folder).iterdir()})


@cache
def renderer() -> Renderer:
    return Renderer.from_model_card(model_card())


class StairsEnv:
    """`Right` climbs a step, others stay; three steps reach the top. `seed` is the first step."""

    def __init__(self, max_turns: int = 10) -> None:
        self.max_turns = max_turns
        self.replies: list[str] = []
        self.num_closes = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.step_number = (seed or 0) % 3
        self.replies = []
        return self.view(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.replies.append(action)
        self.step_number += action == "Right"
        top = self.step_number >= 3
        over = len(self.replies) >= self.max_turns
        info = {"invalid_action": action not in ("Left", "Right"), "note": "text"}
        if top or over:
            info["success"] = float(top)
        return self.view(), float(top) + 0.25, top, over and not top, info

    def view(self) -> str:
        return "FFFF\n" * self.step_number + "PFFF\n"

    def render(self) -> Any:
        return np.full((4, 4, 3), self.step_number, np.uint8)

    def close(self) -> None:
        self.num_closes += 1


class ScriptedPolicy:
    """Says the given replies, and keeps what it was asked."""

    def __init__(self, *replies: str, version: int = 1) -> None:
        self.replies = list(replies)
        self.version = version
        self.prompts: list[list[int]] = []
        self.budgets: list[int] = []
        self.samplings: list[SamplingParams] = []
        self.turns: list[int] = []

    async def generate(self, request: TurnRequest) -> Generation:
        self.prompts.append(as_int32(request.prompt_ids).tolist())
        self.budgets.append(request.max_new_tokens)
        self.samplings.append(request.sampling)
        self.turns.append(request.turn)
        await asyncio.sleep(0)
        ids = renderer().reply_ids(self.replies.pop(0))
        if len(ids) > request.max_new_tokens:
            return generation(ids[: request.max_new_tokens], self.version, FinishReason.LENGTH)
        return generation(ids, self.version)


class ListJournal:
    """A journal in a list; records go through the wire as real ones do."""

    may_have_records = True

    def __init__(self, records: Sequence[bytes] = (), taken_at: int = -1) -> None:
        self.records = list(records)
        self.num_clears = 0
        self.taken_at = taken_at

    async def load(self) -> list[JournalRecord]:
        return [decode_record(record) for record in self.records]

    async def append(self, record: JournalRecord) -> None:
        if record.index == self.taken_at:
            raise EpisodeTakenError("g0.0", "fenced")
        assert record.index == len(self.records)
        self.records.append(encode(record))

    async def require_own(self) -> None:
        """Nobody else loads it."""

    async def clear(self) -> None:
        self.records.clear()
        self.num_clears += 1
