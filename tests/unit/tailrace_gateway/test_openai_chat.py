"""Bodies of chat completions: the fields they set, and refusals that name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tailrace_gateway.core.call import ReplyFormat
from tailrace_gateway.core.errors import BadRequestError
from tailrace_gateway.core.openai_chat import read_chat
from tailrace_gateway.core.openai_responses import read_response
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
        (
            {"stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"vllm_xargs": {"speed": 2}}, "vllm_xargs"),
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
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [USER, {"role": "assistant", "content": [{"type": "refusal", "text": "No."}]}, USER],
            "messages[1].content[0].refusal",
        ),
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


@pytest.mark.parametrize(
    "text", [b"a\\ud83d", b"\\ude00 b", b"\\ud83d and more", b"a\xf0\x9f", b"\xed\xa0\x80"]
)
@pytest.mark.parametrize(
    ("around", "place"),
    [
        (
            b'{"messages": [{"role": "user", "content": "Hi"}, {"content": "%s"}]}',
            "messages[1].content",
        ),
        (b'{"messages": [{"content": [{"text": "%s"}]}]}', "messages[0].content[0].text"),
        (b'{"metadata": {"a": {"%s": 1}}}', "metadata.a"),
    ],
)
def test_a_part_of_a_character_is_refused_by_its_place(text: bytes, around: bytes, place: str) -> None:
    with pytest.raises(BadRequestError, match="send whole characters") as refused:
        read_chat(around % text)
    assert (refused.value.param, refused.value.code) == (place, "invalid_json")
    assert refused.value.message.startswith(f"{place}: ")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "the body is empty"),
        (b" \n", "the body is empty"),
        (b"\xef\xbb\xbf{}", "byte-order mark"),
        (b'{"messages": "\\ud83d"', "not valid JSON"),
        (b'{"temperature": NaN}', "not valid JSON"),
    ],
)
def test_a_body_that_is_not_json_is_told_why(raw: bytes, reason: str) -> None:
    with pytest.raises(BadRequestError, match=reason) as refused:
        read_chat(raw)
    assert refused.value.code == "invalid_json"


@pytest.mark.parametrize(
    "names", [("reasoning",), ("reasoning_content",), ("reasoning", "reasoning_content")]
)
def test_thoughts_come_back_under_either_name_and_count_once(names: tuple[str, ...]) -> None:
    reply = {"role": "assistant", "content": "Yes.", **dict.fromkeys(names, "Hm.")}
    _, call = read_chat(body(USER, reply, USER))
    assert call.messages[1] == ChatMessage("assistant", "Yes.", reasoning="Hm.")


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


def test_a_refusal_and_a_call_without_arguments_are_read() -> None:
    call = {"id": "a1", "type": "function", "function": {"name": "now", "arguments": ""}}
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    called = {"role": "assistant", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a1", "content": "18"}
    _, read = read_chat(body(USER, refused, USER, called, result))
    assert read.messages[1] == ChatMessage("assistant", "No.")
    assert read.messages[3].tool_calls == (ToolCall("a1", "now", "{}"),)


def test_the_smaller_of_two_bounds_counts() -> None:
    _, call = read_chat(body(max_tokens=9, max_completion_tokens=5))
    assert call.max_new_tokens == 5


@pytest.mark.parametrize(
    "fields",
    [
        {"model": None},
        {"stream_options": None},
        {"stream": True, "stream_options": {"include_usage": None}},
        {"session_id": "s", "request_id": "r", "cache_salt": "c", "priority": 3},
        {"thinking_token_budget": -1, "watermarking": False, "logprob_token_ids": []},
        {"stream_interval": 4, "truncation_side": "left", "return_token_offsets": True},
    ],
)
def test_fields_without_effect_are_accepted(fields: dict[str, Any]) -> None:
    assert read_chat(body(**fields))[1] == read_chat(body())[1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"messages": None}, "messages"), ({"messages": [{"role": None}]}, "messages[0].role")],
)
def test_a_null_in_place_of_a_needed_field_is_refused_by_its_name(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequestError) as refused:
        read_chat(body(**fields))
    assert refused.value.param == param


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
    cache = {"prompt_cache_key": "k", "prompt_cache_options": {"mode": "explicit"}}
    books = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", **cache}
    _, noted = read_chat(body(**books))
    assert noted == plain
    _, plain = read_response(json.dumps({"input": "Hi"}).encode())
    _, noted = read_response(json.dumps({"input": "Hi", "max_tool_calls": 3, **books}).encode())
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
        "chat_template_kwargs": {},
    }
    _, same = read_chat(body(**values))
    assert same == plain


def test_an_effort_of_none_also_switches_thinking_off() -> None:
    _, low = read_chat(body(reasoning_effort="low"))
    assert low.template_args == {"reasoning_effort": "low"}
    _, none = read_chat(body(reasoning_effort="none", chat_template_kwargs={"style": "x"}))
    assert none.template_args == {"reasoning_effort": "none", "enable_thinking": False, "style": "x"}


def test_a_verbosity_reaches_the_template() -> None:
    _, low = read_chat(body(verbosity="low"))
    _, also_low = read_response(json.dumps({"input": "Hi", "text": {"verbosity": "low"}}).encode())
    assert low.template_args == also_low.template_args == {"verbosity": "low"}
    with pytest.raises(BadRequestError, match="verbosity: 'loud' is not one of low, medium, high"):
        read_chat(body(verbosity="loud"))


def test_a_field_without_a_value_asks_for_nothing() -> None:
    unset = {"kv_transfer_params": None, "audio": None, "stop": "x", "seed": 1 << 62}
    assert read_chat(body(**unset)) == read_chat(body(stop="x", seed=1 << 62))
    with pytest.raises(BadRequestError) as refused:
        read_chat(body(audio=None, made_up=1))
    assert refused.value.param == "made_up"


def test_vllms_fields_without_effect_ask_for_nothing() -> None:
    usage = {"include_usage": True}
    plain, _ = read_chat(body(stream=True, stream_options=usage))
    given, _ = read_chat(
        body(stream=True, stream_options={**usage, "continuous_usage_stats": False}, vllm_xargs={})
    )
    assert given.with_usage == plain.with_usage
    assert read_chat(body(stream_options={**usage, "made_up": None}, other=None)) == read_chat(
        body(stream_options=usage)
    )
    with pytest.raises(BadRequestError) as refused:
        read_chat(body(stream_options={"made_up": None, "other": 1}))
    assert refused.value.param == "stream_options.other"


def test_an_unknown_field_before_a_broken_byte_is_no_valid_json() -> None:
    with pytest.raises(BadRequestError) as refused:
        read_chat(b'{"audio": null, "messages": \xd3}')
    assert refused.value.code == "invalid_json"
