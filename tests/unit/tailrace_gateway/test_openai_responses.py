"""Bodies of responses: the sampling fields of OpenAI's other dialects work here too, as in vLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tailrace_gateway.core.call import ModelCall
from tailrace_gateway.core.errors import BadRequestError
from tailrace_gateway.core.openai_responses import read_response


def read(**fields: Any) -> ModelCall:
    return read_response(json.dumps({"input": "Hi", **fields}).encode())[1]


def test_sampling_fields_are_read() -> None:
    given = {"top_k": -1, "min_p": 0.1, "seed": 3, "stop": "x", "stop_token_ids": [7]}
    sampling = read(temperature=0.5, top_p=0.9, **given).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 0)
    assert (sampling.min_p, sampling.seed) == (0.1, 3)
    assert (sampling.stop, sampling.stop_token_ids) == (("x",), (7,))


def test_values_of_vllms_fields_without_effect_are_accepted() -> None:
    values = {
        "repetition_penalty": 1.0,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "ignore_eos": False,
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
        "include_reasoning": True,
        "watermarking": False,
        "request_id": "r",
        "session_id": "s",
        "cache_salt": "c",
        "priority": 1,
        "model": None,
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
    }
    assert read(**values) == read()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 1 << 63}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"include_reasoning": False}, "include_reasoning"),
        ({"background": True}, "background"),
        ({"include": ["made_up"]}, "include"),
    ],
)
def test_what_is_not_honoured_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        read(**fields)
    assert refused.value.param == param


def test_a_call_without_arguments_has_an_empty_object() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "now", "arguments": ""}
    result = {"type": "function_call_output", "call_id": "c", "output": "18"}
    question = {"role": "user", "content": "When?"}
    assert read(input=[question, call, result]).messages[1].tool_calls[0].arguments == "{}"
