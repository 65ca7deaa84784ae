"""Bytes that no honest sender makes: each is refused by name, at the boundary."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tailrace.channel.frames import read_chunk_frame, read_request_frame
from tailrace_gateway.core.errors import BadRequestError
from tailrace_gateway.core.openai_chat import read_chat
from tailrace_protos.base import MalformedMessageError, decode, decode_json, encode
from tailrace_protos.control import LeaseRequest
from tailrace_protos.generation import GenerateRequest, TokenSpan
from tailrace_protos.reward import Score, ScoreReply
from tailrace_protos.session import ExportSession, RewardSet
from tailrace_protos.tool import CallTool

_DEEP = b"\x91" * 100_000


@pytest.mark.parametrize("name", ["arguments", "a_field_of_the_future"])
def test_a_value_nested_too_deeply_is_malformed(name: str) -> None:
    head = encode({"type": "call_tool", name: 0})[:-1]
    with pytest.raises(MalformedMessageError, match="recursion"):
        decode(head + (b"\x81\xa1a" if name == "arguments" else b"") + _DEEP, CallTool)
    text = b'{"type":"call_tool","%b":{"a":' % name.encode()
    with pytest.raises(MalformedMessageError, match="recursion"):
        decode_json(text + b"[" * 100_000, CallTool)


@pytest.mark.parametrize(
    ("tag", "read"), [("request_frame", read_request_frame), ("chunk_frame", read_chunk_frame)]
)
def test_a_frame_nested_too_deeply_is_malformed(tag: str, read: Any) -> None:
    head = b"\x96" + encode(tag) + b"\x00\x00\x90" + (b"\xc2" if tag == "request_frame" else b"\xa0")
    with pytest.raises(MalformedMessageError, match="recursion"):
        read(head + _DEEP)


def test_a_body_nested_too_deeply_is_a_bad_request() -> None:
    with pytest.raises(BadRequestError, match="recursion"):
        read_chat(b'{"messages":[],"model":"policy","tools":' + b'[{"a":' * 50_000)


@pytest.mark.parametrize(
    ("message", "place"),
    [
        (ScoreReply((Score("e", math.inf),)), "scores[0].reward"),
        (ScoreReply((Score("e", 1.0, {"a": math.nan}),)), "scores[0].components[...]"),
        (ExportSession("s", {"": -math.inf}), "rewards[...]"),
        (RewardSet("c", math.nan), "reward"),
        (LeaseRequest("w", ("e",), (-1,)), "context_tokens[0]"),
        (LeaseRequest("w", ("e",), (2**64 - 1,)), "context_tokens[0]"),
        (GenerateRequest("c", "e", memoryview(b""), -5), "max_new_tokens"),
        (GenerateRequest("c", "e", memoryview(b""), 2**60), "max_new_tokens"),
        (TokenSpan(2**63, "s", 1), "[0]"),
        (TokenSpan(1, "s", -1), "[2]"),
    ],
)
def test_numbers_without_a_meaning_are_refused_by_their_place(message: Any, place: str) -> None:
    with pytest.raises(MalformedMessageError) as refusal:
        decode(encode(message), type(message))
    assert f"at `$.{place}`" in str(refusal.value) or f"at `${place}`" in str(refusal.value)
