"""Bodies of chat completions: the fields they set, and refusals that name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tailrace_gateway.core.call import ReplyFormat
from tailrace_gateway.core.errors import BadRequestError
from tailrace_gateway.core.openai_chat import read_chat
from tailrace_protos.chat import ChatMessage, ToolCall

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "weather"}}


def body(*messages: Any, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": list(messages or (USER,)), **fields}).encode()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_p": 0}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [TOOL]},
            "tool_choice",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"reasoning_effort": "heroic"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"structured_outputs": {"regex": "x"}}, "structured_outputs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"made_up": 1}, "made_up"),
        ({"stream_options": {"made_up": 1}}, "stream_options.made_up"),
    ],
)
def test_what_is_not_honoured_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        read_chat(body(**fields))
    assert refused.value.param == param
    assert param in refused.value.message


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "judge", "content": "x"}], "messages[0].role"),
        ([USER, {"role": "assistant", "content": "x"}], "messages"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"image_url": "x"}]}], "messages[0].content[0].type"),
        ([USER, {"role": "assistant", "audio": {"id": "x"}}, USER], "messages[1].audio"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
    ],
)
def test_messages_that_cannot_be_read_are_refused_by_their_place(
    messages: list[Any], param: str
) -> None:
    with pytest.raises(BadRequestError) as refused:
        read_chat(body(*messages))
    assert refused.value.param == param


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"messages": []}', b"\xff\xfe", b"{}"])
def test_a_body_that_is_no_request_is_refused(raw: bytes) -> None:
    with pytest.raises(BadRequestError):
        read_chat(raw)


def test_what_clients_echo_makes_the_same_messages() -> None:
    echoed = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "a1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        ],
    }
    result = {"role": "tool", "tool_call_id": "a1", "content": [{"type": "text", "text": "18"}]}
    _, call = read_chat(body({"role": "developer", "content": "Be kind."}, USER, echoed, result))
    assert call.messages == (
        ChatMessage("system", "Be kind."),
        ChatMessage("user", "Hi"),
        ChatMessage("assistant", "", (ToolCall("a1", "weather", "{}"),), reasoning="Hm."),
        ChatMessage("tool", "18", tool_call_id="a1"),
    )


def test_the_smaller_of_two_bounds_counts() -> None:
    _, call = read_chat(body(max_tokens=9, max_completion_tokens=5))
    assert call.max_new_tokens == 5


def test_wishes_are_read() -> None:
    _, call = read_chat(
        body(
            temperature=0.5,
            top_k=-1,
            seed=3,
            stop="x",
            n=2,
            tools=[TOOL],
            tool_choice="required",
            parallel_tool_calls=False,
            response_format={"type": "json_object"},
        )
    )
    assert (call.sampling.temperature, call.sampling.top_k, call.sampling.seed) == (0.5, 0, 3)
    assert call.sampling.stop == ("x",)
    assert call.num_choices == 2
    assert call.constraints.needs_tool_call
    assert call.constraints.max_tool_calls == 1
    assert call.constraints.reply_format is ReplyFormat.JSON_OBJECT


def test_fields_for_other_peoples_books_change_nothing() -> None:
    _, plain = read_chat(body())
    _, noted = read_chat(body(user="u", metadata={"a": "b"}, store=True, service_tier="auto"))
    assert noted == plain


def test_values_of_vllms_fields_without_effect_are_accepted() -> None:
    _, plain = read_chat(body())
    values = {
        "repetition_penalty": 1.0,
        "length_penalty": 1.0,
        "min_tokens": 0,
        "ignore_eos": False,
        "use_beam_search": False,
        "best_of": 1,
        "echo": False,
        "bad_words": [],
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "add_special_tokens": False,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "include_reasoning": True,
        "return_tokens_as_token_ids": False,
        "truncate_prompt_tokens": None,
        "prompt_logprobs": None,
        "structured_outputs": None,
        "guided_json": None,
        "documents": None,
        "chat_template": None,
        "stop_token_ids": [],
        "priority": 0,
        "request_id": "r1",
        "cache_salt": "x",
        "verbosity": "medium",
        "chat_template_kwargs": {},
    }
    _, same = read_chat(body(**values))
    assert same == plain


def test_an_effort_of_none_also_switches_thinking_off() -> None:
    _, low = read_chat(body(reasoning_effort="low"))
    assert low.template_args == {"reasoning_effort": "low"}
    _, none = read_chat(body(reasoning_effort="none", chat_template_kwargs={"style": "x"}))
    assert none.template_args == {"reasoning_effort": "none", "enable_thinking": False, "style": "x"}


def test_a_field_without_a_value_asks_for_nothing() -> None:
    unset = {"kv_transfer_params": None, "audio": None, "stop": "x", "seed": 1 << 62}
    assert read_chat(body(**unset)) == read_chat(body(stop="x", seed=1 << 62))
    with pytest.raises(BadRequestError) as refused:
        read_chat(body(audio=None, made_up=1))
    assert refused.value.param == "made_up"


def test_an_unknown_field_before_a_broken_byte_is_no_valid_json() -> None:
    with pytest.raises(BadRequestError) as refused:
        read_chat(b'{"audio": null, "messages": \xd3}')
    assert refused.value.code == "invalid_json"
