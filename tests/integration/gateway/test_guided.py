"""Required calls and formats of requests bind a real engine, whose random model would never comply."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import torch

from tailrace.channel import Address, ZmqGenerateServer
from tailrace.weights import TensorBytes
from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.driver import EngineDriver, torch_engine
from tailrace_inference.handlers import InferenceHandler
from tailrace_protos.weights import ModelCard
from tests.contract.engine.harness import MODEL
from tests.world.byte_model import model_card
from tests.world.gateway import GatewayWorld

VOCAB_SIZE = 262
USER: Any = {"role": "user", "content": "Weather?"}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "", "parameters": CITY}},
    {"type": "function", "function": {"name": "stop", "description": "", "parameters": {}}},
]
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY}}


async def random_engine() -> EngineDriver:
    """The torch engine with weights that prefer nothing, the same ones in each run of the tests.

    With many a seed it thinks, or repeats calls, until its tokens are spent.
    """
    torch.manual_seed(1)
    config_json = json.dumps(MODEL | {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 2048})
    card = ModelCard(config_json.encode(), model_card().tokenizer_files)
    engine = torch_engine(card, InferenceConfig(max_running=8, kv_cache_tokens=8192))
    await engine.start()
    weights = [
        TensorBytes(
            name, "float32", tuple(p.shape), memoryview((p * 0.1).contiguous().numpy()).cast("B")
        )
        for name, p in engine.engine._model.model.named_parameters()  # type: ignore[attr-defined]
    ]
    await engine.stage(iter(weights), 0)
    await engine.apply()
    return engine


@pytest.fixture
async def client(empty_world: GatewayWorld) -> AsyncIterator[openai.AsyncOpenAI]:
    world = empty_world
    engine = await random_engine()
    handler = InferenceHandler(engine, lambda: False)
    handler.has_weights = True
    server = ZmqGenerateServer(f"ipc://{world.folder}/engine.ipc")
    await server.start(handler)
    world.scheduler.addresses[:] = [Address("engine", "", server.endpoint)]
    await world.start_gateway(on_broken_promise="refuse")
    yield world.openai(await world.open())
    await server.stop()
    await engine.close()


async def ask(client: openai.AsyncOpenAI, **settings: Any) -> Any:
    answer = await client.chat.completions.create(
        model="any", messages=[USER], max_tokens=400, seed=1, **settings
    )
    return answer.choices[0]


async def test_a_named_tool_is_called_with_arguments_of_its_schema(client: openai.AsyncOpenAI) -> None:
    choice = await ask(
        client, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}}
    )
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    assert json.loads(choice.message.tool_calls[0].function.arguments)["city"] in ("Rome", "Oslo")
    assert choice.finish_reason == "tool_calls"


async def test_some_tool_is_called_where_one_is_required(client: openai.AsyncOpenAI) -> None:
    choice = await ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert [call.function.name in ("weather", "stop") for call in choice.message.tool_calls] == [True]


@pytest.mark.parametrize("with_tools", [False, True])
async def test_a_format_binds_the_answer_and_leaves_calls_possible(
    client: openai.AsyncOpenAI, with_tools: bool
) -> None:
    choice = await ask(client, response_format=FORMAT, **({"tools": TOOLS} if with_tools else {}))
    if not choice.message.tool_calls:
        assert json.loads(choice.message.content)["city"] in ("Rome", "Oslo")
    assert with_tools or not choice.message.tool_calls


async def test_without_guidance_a_reply_is_only_checked(empty_world: GatewayWorld) -> None:
    await empty_world.start_gateway(guided_decoding="off")
    client = empty_world.openai(await empty_world.open())
    await ask(client, tools=TOOLS, tool_choice="required")
    assert empty_world.model.requests[-1].guide is None


async def test_required_guidance_goes_to_the_engine_as_such(empty_world: GatewayWorld) -> None:
    await empty_world.start_gateway(guided_decoding="required")
    client = empty_world.openai(await empty_world.open())
    await ask(client, tools=TOOLS, tool_choice="required")
    guide = empty_world.model.requests[-1].guide
    assert guide is not None
    assert not guide.is_optional
    assert guide.calls is not None
    assert (guide.calls.begin, len(guide.calls.schemas)) == ("<tool_call>\n", 2)
    assert (guide.thought_begin, guide.thought_end) == ("<think>", "</think>")
