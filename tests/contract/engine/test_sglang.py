"""SGLang itself: exact versions in flight, traps of its streams, refusals, a hang."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tokenizers import Tokenizer, decoders, models

from tailrace.config import ConfigError
from tailrace_inference.adapters.engines import start_engine
from tailrace_inference.config import InferenceConfig
from tailrace_inference.ports import Engine, EngineFailedError
from tailrace_protos.base import pack_int32
from tailrace_protos.generation import CallErrorCode, FinishReason, GenerateRequest, SamplingParams
from tailrace_protos.weights import ModelCard
from tests.unit.tailrace_inference.harness import (
    BASE,
    VOCAB_SIZE,
    Asked,
    config_json,
    make_model,
    own_logprobs,
    weights_of,
)

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TAILRACE_ENGINE") != "sglang", reason="run by make test-engines"
    ),
    pytest.mark.asyncio(loop_scope="module"),
]
SETTINGS: dict[str, Any] = {"engine": "sglang", "max_running": 64}
MODELS = [make_model(seed=0), make_model(seed=1)]
TOLERANCE = 2e-5


def card() -> ModelCard:
    tokenizer = Tokenizer(models.WordLevel({chr(33 + i): i for i in range(VOCAB_SIZE)}, unk_token="!"))
    tokenizer.decoder = decoders.Fuse()
    return ModelCard(config_json(), {"tokenizer.json": tokenizer.to_str().encode()})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Engine]:
    made = await start_engine(card(), InferenceConfig(**SETTINGS))
    await update(made)
    yield made
    await made.close()


async def update(engine: Engine) -> None:
    version = engine.stats().policy_version + 1
    await engine.stage(weights_of(MODELS[version % 2]), version)
    await engine.apply()


def ask(engine: Engine, call_id: str, num_new: int, **sampling: Any) -> Asked:
    request = GenerateRequest(
        call_id, call_id, pack_int32([3, 4, 5]), num_new, SamplingParams(**sampling)
    )
    asked = Asked(request, [3, 4, 5])
    engine.submit(request, asked.on_chunk)
    return asked


async def ended(*many: Asked) -> None:
    async with asyncio.timeout(60):
        while not all(asked.ended for asked in many):
            await asyncio.sleep(0.01)


async def begun(*many: Asked) -> None:
    async with asyncio.timeout(60):
        while not all(asked.chunks for asked in many):
            await asyncio.sleep(0.01)


def worst_drift(asked: Asked) -> float:
    """Largest difference of a log-probability from that of its version's own forward."""
    own = [own_logprobs(model, asked.ids)[len(asked.prompt) - 1 :] for model in MODELS]
    spans = asked.generation.spans
    versions = np.repeat([s.policy_version for s in spans], [s.num_tokens for s in spans])
    right = np.where(versions % 2 == 0, own[0], own[1])
    return float(np.abs(right - asked.generation.inference_logprobs).max())


async def test_64_calls_run_through_20_updates_with_exact_versions(engine: Engine) -> None:
    many = [ask(engine, f"flight-{n}", 200) for n in range(64)]
    await begun(*many)
    for _ in range(20):
        await update(engine)
        await asyncio.sleep(0.02)  # some steps with this version
    await ended(*many)
    assert {asked.generation.finish_reason for asked in many} == {FinishReason.LENGTH}
    assert {asked.generation.num_tokens for asked in many} == {200}
    assert max(len(asked.generation.spans) for asked in many) > 3
    assert max(worst_drift(asked) for asked in many) < TOLERANCE


async def test_a_call_aborted_while_the_engine_is_held_repeats_no_token(engine: Engine) -> None:
    """SGLang repeats the last token of a call that it aborts in its queue, as those of a swap are."""
    held = [ask(engine, f"held-{n}", 240) for n in range(8)]
    await begun(*held)
    await engine.pause()
    await update(engine)
    late = ask(engine, "late", 5)
    for asked in (*held, late):
        engine.abort(asked.request.call_id)
    await ended(*held, late)
    await engine.resume()
    assert {asked.generation.finish_reason for asked in held} == {FinishReason.ABORT}
    assert late.generation.num_tokens == 0
    assert max(worst_drift(asked) for asked in held) < TOLERANCE
    assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 0)


async def test_an_abort_ends_no_call_whose_id_begins_with_the_same_letters(engine: Engine) -> None:
    one, two = ask(engine, "call-1", 60), ask(engine, "call-12", 60)
    engine.abort("call-1")
    await ended(one, two)
    assert one.generation.finish_reason is FinishReason.ABORT
    assert two.generation.num_tokens == 60


async def test_a_stop_string_across_tokens_ends_the_call_there(engine: Engine) -> None:
    free = ask(engine, "free", 40, temperature=0.0)
    await ended(free)
    new = free.generation.token_ids.tolist()
    text = "".join(chr(33 + token) for token in new)
    stopped = ask(engine, "stopped", 40, temperature=0.0, stop=(text[7:10],))
    await ended(stopped)
    assert stopped.generation.token_ids.tolist() == new[: text.index(text[7:10]) + 3]
    assert stopped.generation.stop_matched == text[7:10]


@pytest.mark.parametrize(
    ("sampling", "field"),
    [({"seed": 1}, "sampling.seed"), ({"top_k": 5, "top_p": 0.9}, "sampling.top_p")],
    ids=str,
)
async def test_a_request_beyond_its_features_is_refused_by_name(
    engine: Engine, sampling: dict[str, Any], field: str
) -> None:
    asked = ask(engine, f"refused-{field}", 5, **sampling)
    assert asked.error.code is CallErrorCode.INVALID
    assert field in asked.error.reason


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dp_size": 2}, "engine_args.dp_size: start one server for each data-parallel group"),
        ({"speculative_algorithm": "NGRAM"}, "engine_args.speculative_algorithm"),
        ({"model_path": "elsewhere"}, "engine_args.model_path: Tailrace sets it: remove it"),
        ({"no_such_argument": 1}, "no_such_argument"),
    ],
    ids=str,
)
async def test_arguments_that_cannot_work_are_refused_by_name(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        await start_engine(card(), InferenceConfig(**SETTINGS, engine_args=arguments))


async def test_experts_in_another_layout_are_refused() -> None:
    content = BASE | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    with pytest.raises(ConfigError, match=r"experts.* take torch for qwen3_moe"):
        await start_engine(ModelCard(json.dumps(content).encode(), {}), InferenceConfig(**SETTINGS))


async def test_a_stopped_engine_is_noticed_and_no_control_call_waits_for_it(engine: Engine) -> None:
    open_call = ask(engine, "open", 240)
    await begun(open_call)
    for process in engine._sglang.processes:  # type: ignore[attr-defined]
        process.suspend()
    async with asyncio.timeout(2):
        with pytest.raises(EngineFailedError, match="not answered"):
            await engine.watch()
        with pytest.raises(EngineFailedError):
            await engine.pause()
