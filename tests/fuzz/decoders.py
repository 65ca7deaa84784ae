"""Targets in this process: decoders of every message, and what services do with decoded ones.

A target takes bytes and returns "taken" or "refused"; any other exception is a crash of the product.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np

import tailrace_protos
from tailrace.channel.frames import read_chunk_frame, read_request_frame
from tailrace.ledger import Ledger, UnknownCompletionError
from tailrace.sdk.tool import ArgumentsError
from tailrace.store import GroupRecord
from tailrace.store.errors import MALFORMED
from tailrace.store.outbox import _event
from tailrace.tools.conversion import parse_arguments
from tailrace_gateway.core import anthropic_messages, openai_chat, openai_completions, openai_responses
from tailrace_gateway.core.errors import ApiError
from tailrace_inference.core.requests import InvalidRequestError, check_request
from tailrace_inference.ports import EngineFeatures
from tailrace_learner.core.batch.group_returns import RowLimits, group_returns
from tailrace_protos.base import MalformedMessageError, decode, decode_json
from tailrace_protos.event import EventBody
from tailrace_protos.generation import ChunkFrame, GenerateRequest, RequestFrame
from tailrace_protos.journal import JournalRecord, decode_record
from tailrace_protos.reward import ScoreRequest
from tailrace_protos.session import ExportStyle, LedgerNode
from tailrace_protos.trajectory import TrajectoryGroup
from tailrace_reward.config import RewardConfig
from tailrace_reward.core.scoring import Scorer
from tests.fuzz.mutate import Chooser, as_json, as_msgpack, damaged, maker
from tests.world.byte_model import renderer

_VARIANTS = 4  # inputs of one made value: itself, and damaged ones
Run = Callable[[bytes], None]


class RefusedError(Exception):
    """The input is refused by an error that the product means to raise."""


class Target(NamedTuple):
    """A boundary: the type of its inputs and the code behind it; `share` of the campaign's inputs."""

    name: str
    kind: Any
    run: Run
    is_json: bool = False
    share: float = 1.0
    base: Mapping[str, Any] = MappingProxyType({})  # a valid value, of which an input changes fields

    def input_of(self, seed: int, index: int) -> bytes:
        """Makes the input of an index."""
        rng = Chooser.of(f"{self.name}/{seed}/{index // _VARIANTS}")
        value = maker(self.kind)(rng, 0)
        if self.base:
            kept = (
                {name for name in value if rng.random() < rng.hostile}
                if isinstance(value, dict)
                else ()
            )
            value = dict(self.base) | {name: value[name] for name in kept}
        data = as_json(value, rng) if self.is_json else as_msgpack(value)
        if index % _VARIANTS == 0:
            return data
        return damaged(data, Chooser.of(f"{self.name}/{seed}/{index}"))


def _refusing(run: Callable[[bytes], object], *errors: type[Exception]) -> Run:
    def guarded(data: bytes) -> None:
        try:
            run(data)
        except errors as error:
            raise RefusedError(str(error)) from error

    return guarded


def message_types() -> list[type[msgspec.Struct]]:
    """All types of messages and their parts."""
    found: list[type[msgspec.Struct]] = []
    for module in pkgutil.iter_modules(tailrace_protos.__path__):
        loaded = importlib.import_module(f"tailrace_protos.{module.name}")
        found += [
            kind
            for kind in vars(loaded).values()
            if isinstance(kind, type)
            and issubclass(kind, msgspec.Struct)
            and kind.__module__ == loaded.__name__
            and not kind.__name__.startswith("_")
        ]
    return found


def decoder_targets() -> Iterator[Target]:
    """One decoder for each type of message, as msgpack and as JSON."""
    for kind in message_types():
        name = kind.__name__

        def from_msgpack(data: bytes, kind: Any = kind) -> object:
            return decode(data, kind)

        def from_json(data: bytes, kind: Any = kind) -> object:
            return decode_json(data, kind)

        yield Target(f"decode/{name}", kind, _refusing(from_msgpack, MalformedMessageError))
        json_too = _refusing(from_json, MalformedMessageError)
        yield Target(f"decode_json/{name}", kind, json_too, is_json=True, share=0.5)


def handler_targets() -> Iterator[Target]:
    """Code behind the decoders."""
    malformed = MalformedMessageError
    yield Target("journal", JournalRecord, _refusing(decode_record, malformed), share=8)
    yield Target("frames/request", RequestFrame, _refusing(read_request_frame, malformed), share=8)
    yield Target("frames/chunk", ChunkFrame, _refusing(read_chunk_frame, malformed), share=8)
    yield Target("outbox", EventBody, _refusing(_outbox, *MALFORMED), share=8)
    yield Target("groups", GroupRecord, _refusing(_group, *MALFORMED), share=4)
    generate = _refusing(_generate, malformed, InvalidRequestError)
    yield Target("inference", GenerateRequest, generate, share=8, base=_REQUEST)
    ledger = _refusing(_ledger, malformed, UnknownCompletionError, ValueError)
    yield Target("ledger", LedgerNode, ledger, share=8, base=_NODE)
    yield Target("learner", TrajectoryGroup, _refusing(_learner, malformed), share=8)
    yield Target("reward", ScoreRequest, _refusing(_Rewards().score, malformed), share=4)
    tool_call = _refusing(lambda data: parse_arguments(data.decode(errors="replace")), ArgumentsError)
    yield Target("tools/arguments", dict[str, Any], tool_call, is_json=True, share=4)
    for name, kind, base, read in _DIALECTS:
        run = _refusing(read, ApiError)
        yield Target(f"gateway/{name}", kind, run, is_json=True, share=8, base=base)


_TURN = {"model": "policy", "messages": [{"role": "user", "content": "1"}]}
_REQUEST = {
    "type": "generate_request",
    "call_id": "c",
    "episode_id": "g0.0",
    "prompt_ids": b"\x01\0\0\0",
    "max_new_tokens": 8,
}
_NODE = {
    "type": "ledger_node",
    "completion_id": "c",
    "parent_id": "",
    "messages": [{"role": "user", "content": "1"}],
    "inserted_ids": b"\x01\0\0\0",
    "token_ids": b"\x02\0\0\0",
    "inference_logprobs": b"\0\0\0\xbf",
    "spans": [[1, "s", 1]],
    "finish_reason": "stop",
    "reply": {"role": "assistant", "content": "2"},
}
_PROMPT = {"model": "policy", "prompt": "1", "max_tokens": 1}
_INPUT = {"model": "policy", "input": "1"}
_DIALECTS: tuple[tuple[str, Any, dict[str, Any], Callable[[bytes], object]], ...] = (
    ("chat", openai_chat.ChatRequest, _TURN, openai_chat.read_chat),
    ("completions", openai_completions.CompletionRequest, _PROMPT, openai_completions.read_completion),
    ("responses", openai_responses.ResponseRequest, _INPUT, openai_responses.read_response),
    (
        "messages",
        anthropic_messages.MessagesRequest,
        _TURN | {"max_tokens": 1},
        anthropic_messages.read_messages_request,
    ),
    ("count_tokens", anthropic_messages.MessagesRequest, _TURN, anthropic_messages.read_count_request),
)
_FEATURES = EngineFeatures()
_LIMITS = RowLimits(max_tokens=64, vocabulary=300)


def _outbox(data: bytes) -> None:
    _event("1-0", [b"s", b"learner", b"b", data])


def _group(data: bytes) -> None:
    decode(data, GroupRecord)


def _generate(data: bytes) -> None:
    check_request(decode(data, GenerateRequest), 64, 300, _FEATURES)


def _ledger(data: bytes) -> None:
    ledger = Ledger(renderer())
    ledger.add(decode(data, LedgerNode))
    for style in ExportStyle:
        ledger.rows(style)


def _learner(data: bytes) -> None:
    group = decode(data, TrajectoryGroup)
    returns = group_returns(group, _LIMITS, Counter())
    assert np.isfinite(returns.rewards[returns.is_valid]).all(), "a reward that is no number is trained"


class _Rewards:
    """A scorer with the default components, and the loop that it runs in."""

    def __init__(self) -> None:
        self._scorer = Scorer(RewardConfig().components)
        self._loop = asyncio.new_event_loop()

    def score(self, data: bytes) -> None:
        """Scores; asserts that no reward is infinite."""
        request = decode(data, ScoreRequest)
        for score in self._loop.run_until_complete(self._scorer.score(request.items)):
            assert score.error is not None or math.isfinite(score.reward), "an infinite reward is sent"
