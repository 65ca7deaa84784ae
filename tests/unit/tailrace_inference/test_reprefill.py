"""Tokens computed again because a context left the cache between two turns, and nothing else, count."""

from __future__ import annotations

from typing import Any

from tailrace.channel import ChunkSink
from tailrace_inference.config import InferenceConfig
from tailrace_inference.core.reprefill import ContextRecord, kept_contexts
from tailrace_inference.handlers import InferenceHandler
from tailrace_inference.ports import EngineFeatures
from tailrace_protos.generation import TokenChunk
from tests.unit.tailrace_inference.harness import Asked, Client, make_engine, make_model, weights_of

PROMPT = [*range(3, 43)]
TURN = 24  # sampled tokens


class Sink:
    """Hands chunks of the handler to a call of the harness."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def send(self, chunk: TokenChunk) -> None:
        self._asked.on_chunk(chunk)


class HandledClient(Client):
    """Asks through the service's handler."""

    def __init__(self, **settings: Any) -> None:
        self.model = make_model()
        super().__init__(make_engine(self.model, kv_block_tokens=8, max_running=4, **settings))
        self.handler = InferenceHandler(self.engine, lambda: False, None, ContextRecord(8))  # type: ignore[arg-type]
        self.handler.has_weights = True
        submit = self.engine.submit
        self.engine.submit = self._through  # type: ignore[method-assign]
        self._submit = submit

    def _through(self, request: Any, on_chunk: Any) -> None:
        sink: ChunkSink = Sink(self.asked[-1])
        self.engine.submit = self._submit  # type: ignore[method-assign]
        self.handler.submit(request, sink)
        self.engine.submit = self._through  # type: ignore[method-assign]

    def turn(self, episode: str, prompt: list[int]) -> list[int]:
        return self.one(prompt, TURN, episode=episode).ids

    @property
    def num_recomputed(self) -> int:
        return self.handler.num_recomputed_tokens


def test_a_context_that_stayed_costs_nothing() -> None:
    client = HandledClient(kv_cache_tokens=1024)
    ids = client.turn("one", PROMPT)
    client.turn("two", PROMPT)
    client.turn("one", [*ids, 5, 6])
    assert client.num_recomputed == 0


def test_a_context_that_others_drove_out_counts_once_with_all_its_tokens() -> None:
    client = HandledClient(kv_cache_tokens=128)
    ids = client.turn("one", PROMPT)
    for other in range(3):
        client.turn(f"other-{other}", [other, *PROMPT])
    ids = client.turn("one", [*ids, 5, 6])
    assert client.num_recomputed == len(PROMPT) + TURN - 1
    client.turn("one", [*ids, 7])
    assert client.num_recomputed == len(PROMPT) + TURN - 1, "it was there this time"


def test_new_weights_and_rewritten_prompts_are_no_eviction() -> None:
    client = HandledClient(kv_cache_tokens=1024)
    ids = client.turn("one", PROMPT)
    client.engine.stage(weights_of(client.model), 1)
    client.engine.apply()
    client.turn("one", [*ids, 5])
    client.turn("one", [9, 9, *PROMPT])
    assert client.num_recomputed == 0


def test_preempted_tokens_count_in_the_engine() -> None:
    client = HandledClient(kv_cache_tokens=160)
    for episode in range(3):
        client.ask([episode, *PROMPT], 60, episode=str(episode))
    client.finish()
    stats = client.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_preempted_tokens >= stats.num_preemptions * len(PROMPT)
    assert stats.num_preempted_tokens <= stats.num_preemptions * (len(PROMPT) + 61)


def test_contexts_count_only_where_the_engine_keeps_them() -> None:
    keeps, computes_again = EngineFeatures(), EngineFeatures(prefix_reuse=False)
    assert kept_contexts(InferenceConfig(), keeps) is not None
    assert kept_contexts(InferenceConfig(prefix_cache=False), keeps) is None
    assert kept_contexts(InferenceConfig(engine="hf"), computes_again) is None
