"""Replies that are read while they arrive: returned text is never taken back, however tokens are
cut."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tailrace.chat import ChatArgs, ParsedReply, Renderer, ReplyDelta, ReplyStream
from tailrace.chat.text_stream import StopText, TokenText, first_possible
from tailrace_protos.chat import ChatMessage, ToolCall
from tests.unit.tailrace.chat import families
from tests.unit.tailrace.chat.families import FAMILIES, HARMONY, LLAMA3, MISTRAL, QWEN, TOOLS, Family

PARSERS = (
    "hermes", "qwen3_coder", "glm45", "llama3_json", "mistral", "deepseek", "pythonic", "none",
)  # fmt: skip
FRAGMENTS = (
    "<tool_call>", "</tool_call>", '{"name": "search", "arguments": {"query": "é"}}', "<think>",
    "</think>", "<function=search>", "<parameter=query>", "</parameter>", "</function>", "[TOOL_CALLS]",
    "<tool_call>search", "<arg_key>query", "</arg_key>", "<arg_value>", "</arg_value>",
    "[ARGS]", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "[search(query='a')]", "<|python_tag|>",
    "<|channel|>", "analysis", "final", "<|message|>", "<|end|>",
    "<|start|>", "assistant", " to=functions.search", "<|call|>", "STOP", "ST", "O", "P!", " ", "\n",
    "\n\n", "words", "é", "漢", "<", "[", "{",
)  # fmt: skip


@cache
def renderer(family: Family, tool_parser: str) -> Renderer:
    chat = ChatArgs(tool_parser=tool_parser)
    return Renderer.from_model_card(families.card(family), chat)


def encoded(family: Family, text: str, chance: random.Random) -> list[int]:
    """Ids of the text, of words or of single bytes, at times with noise in between."""
    ids: list[int] = []
    while text:
        size = chance.choice((1, 1, 3, 40))
        ids += families.encoded(family, text[:size]).tolist()
        text = text[size:]
        if chance.random() < 0.02:
            ids.append(chance.randrange(families.tokenizer(family).get_vocab_size()))
    return ids


def streamed(
    stream: ReplyStream, ids: list[int], chance: random.Random
) -> tuple[ReplyDelta, ParsedReply]:
    """Sum of all deltas with the rest, and the reply."""
    content = reasoning = ""
    while ids:
        size = chance.choice((1, 1, 2, 5, 50))
        delta = stream.feed(np.array(ids[:size], np.int32))
        content, reasoning = content + delta.content, reasoning + delta.reasoning
        ids = ids[size:]
    parsed = stream.finish()
    return ReplyDelta(content + parsed.rest.content, reasoning + parsed.rest.reasoning), parsed


CASES = [*((QWEN, name) for name in PARSERS), (LLAMA3, "auto"), (MISTRAL, "auto"), (HARMONY, "auto")]


@pytest.mark.parametrize(("family", "tool_parser"), CASES, ids=str)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    chance=st.randoms(use_true_random=True),
    stop=st.sampled_from([(), ("STOP",), ("\n\n", "STOP!")]),
)
@settings(max_examples=80, deadline=None)
def test_deltas_add_up_to_the_final_texts_however_the_tokens_are_cut(
    family: Family, tool_parser: str, fragments: list[str], chance: random.Random, stop: tuple[str, ...]
) -> None:
    ours = renderer(family, tool_parser)
    ids = encoded(family, "".join(fragments), chance)
    at_once = ours.parse_reply(np.array(ids, np.int32), TOOLS, stop=stop)
    whole, parsed = streamed(ours.reply_stream(TOOLS, stop=stop), ids, chance)
    assert whole == ReplyDelta(parsed.message.content, parsed.message.reasoning)
    assert parsed.message == at_once.message
    assert parsed.malformed == at_once.malformed
    assert at_once.rest == whole


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_content_is_given_while_it_arrives(family: Family) -> None:
    ours = families.renderer(family)
    stream = ours.reply_stream()
    reply = ChatMessage("assistant", "It is fine weather in the harbour.")
    ids = families.encoded(family, family.write(reply)).tolist()
    given_before_the_end = "".join(stream.feed([token_id]).content for token_id in ids[:-1])
    assert given_before_the_end == reply.content
    assert stream.feed(ids[-1:]) == ReplyDelta()
    assert stream.finish() == ParsedReply(reply)


def test_thoughts_are_given_apart_and_without_the_white_space_around_them() -> None:
    stream = families.renderer(QWEN).reply_stream()
    deltas = [
        stream.feed(families.encoded(QWEN, piece))
        for piece in (
            "<think>",
            "\n I ",
            "think.\n",
            "\n</think>",
            "\n\n",
            "So",
            " be it. ",
            "<|im_end|>",
        )
    ]
    assert [delta.reasoning for delta in deltas] == ["", "I", " think.", "", "", "", "", ""]
    assert [delta.content for delta in deltas] == ["", "", "", "", "", "So", " be it.", ""]
    assert stream.finish().message == ChatMessage("assistant", "So be it. ", reasoning="I think.")


def test_a_prompt_that_opens_the_thought_begins_inside_it() -> None:
    files = families.card(QWEN).tokenizer_files
    template = files["chat_template.jinja"].decode()
    opens = template.replace(
        "assistant\\n' -}}{%- endif -%}", "assistant\\n<think>\\n' -}}{%- endif -%}"
    )
    assert opens != template
    card = families.card(QWEN).__class__(b"{}", {**files, "chat_template.jinja": opens.encode()})
    ours = Renderer.from_model_card(card)
    parsed = ours.parse_reply(families.encoded(QWEN, "hm\n</think>\n\nYes<|im_end|>"))
    assert parsed.message == ChatMessage("assistant", "Yes", reasoning="hm")
    unfinished = ours.parse_reply(families.encoded(QWEN, "hm and"))
    assert unfinished.message == ChatMessage("assistant", "", reasoning="hm and")
    history = [ChatMessage("user", "q"), parsed.message]
    inserted = ours.continuation_ids(history, [ChatMessage("user", "go")], closed=True)
    text = families.tokenizer(QWEN).decode(inserted.tolist(), skip_special_tokens=False)
    assert text == "\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n<think>\n"


def test_calls_in_thoughts_are_thoughts() -> None:
    text = '<think><tool_call>{"name": "now"}</tool_call></think>no<|im_end|>'
    parsed = families.renderer(QWEN).parse_reply(families.encoded(QWEN, text))
    assert parsed.message == ChatMessage(
        "assistant", "no", reasoning='<tool_call>{"name": "now"}</tool_call>'
    )


def test_harmony_channels_become_thoughts_content_and_calls() -> None:
    text = (
        "<|channel|>analysis<|message|>first<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>then<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.search <|constrain|>json<|message|>"
        '{"query": "a"}<|call|>'
    )
    parsed = families.renderer(HARMONY).parse_reply(families.encoded(HARMONY, text), id_seed="c0")
    (call,) = parsed.message.tool_calls
    assert (call.name, call.arguments) == ("search", '{"query": "a"}')
    assert parsed.message.content == "I look."
    assert parsed.message.reasoning == "first\nthen"


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.search <|constrain|>json",
        " to=functions.search<|channel|>commentary json",
    ],
)
def test_a_harmony_call_without_a_message_is_malformed(header: str) -> None:
    text = f"<|channel|>final<|message|>I look.<|end|><|start|>assistant{header}<|call|>"
    parsed = families.renderer(HARMONY).parse_reply(families.encoded(HARMONY, text))
    assert parsed.message.content == f"I look.<|start|>assistant{header}"
    assert "no recipient or no message" in parsed.malformed
    alone = families.renderer(HARMONY).parse_reply(families.encoded(HARMONY, f"{header}<|call|>"))
    assert (alone.num_malformed, alone.message.tool_calls) == (1, ())


def test_a_harmony_header_without_a_message_is_no_content() -> None:
    text = "<|channel|>final<|message|>Yes.<|end|><|start|>assistant<|channel|>final"
    parsed = families.renderer(HARMONY).parse_reply(families.encoded(HARMONY, text))
    assert (parsed.message.content, parsed.num_malformed) == ("Yes.", 0)


def test_a_malformed_call_is_told_to_the_model_and_counted() -> None:
    text = 'Look:<tool_call>{"name": "search", </tool_call><|im_end|>'
    parsed = families.renderer(QWEN).parse_reply(families.encoded(QWEN, text))
    assert parsed.num_malformed == 1
    assert "could not be read: invalid JSON" in parsed.malformed
    assert parsed.message == ChatMessage("assistant", 'Look:<tool_call>{"name": "search", </tool_call>')


def test_a_stray_end_of_calls_is_not_streamed_as_content() -> None:
    stream = renderer(QWEN, "deepseek").reply_stream()
    pieces = ("a", "<｜tool▁calls▁end｜>", "b", "<|im_end|>")
    given = "".join(stream.feed(families.encoded(QWEN, piece)).content for piece in pieces)
    parsed = stream.finish()
    assert given + parsed.rest.content == parsed.message.content == "ab"


def test_a_call_whose_name_no_message_can_carry_is_told_to_the_model() -> None:
    text = '<tool_call>{"name": "\\ud800"}</tool_call><|im_end|>'
    parsed = families.renderer(QWEN).parse_reply(families.encoded(QWEN, text))
    assert (parsed.num_malformed, parsed.message.tool_calls) == (1, ())
    parsed.malformed.encode()


def test_special_tokens_that_no_parser_needs_are_no_text() -> None:
    text = "a<|im_start|>b<|endoftext|>c<|im_end|>"
    assert families.renderer(QWEN).parse_reply(families.encoded(QWEN, text)).message.content == "abc"


def test_stop_strings_are_no_part_of_the_content() -> None:
    ids = families.encoded(QWEN, "one two END")
    assert families.renderer(QWEN).parse_reply(ids, stop=("END", "two E")).message.content == "one "


def test_ids_of_calls_follow_from_the_seed_so_that_reading_again_finds_the_same() -> None:
    ids = families.encoded(
        QWEN, '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "now"}</tool_call>'
    )
    ours = families.renderer(QWEN)
    first, again, other = (
        ours.parse_reply(ids, id_seed=seed).message.tool_calls for seed in ("a", "a", "b")
    )
    assert first == again
    assert len({call.id for call in (*first, *other)}) == 4
    assert all(len(call.id) == 9 and call.id.isalnum() for call in first)
    assert isinstance(first[0], ToolCall)


@pytest.mark.parametrize("text", ["a", "é", "漢字", "👩‍🚀 up"])
def test_characters_are_given_whole_although_tokens_cut_them(text: str) -> None:
    made = Tokenizer(models.BPE(vocab=byte_vocab(), merges=[], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    stream = TokenText(made, frozenset(), frozenset())
    pieces = [stream.feed([byte]) for byte in text.encode()]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    assert stream.feed([0xE6]) == ""
    assert set(stream.finish()) == {"\ufffd"}


def byte_vocab() -> dict[str, int]:
    return {f"<0x{byte:02X}>": byte for byte in range(256)}


def test_a_stop_string_is_held_back_until_it_is_sure() -> None:
    stop = StopText(("<END>",))
    assert [stop.feed(piece) for piece in ("a<E", "x<", "END", "> no more", "at all")] == [
        "a", "<Ex", "", "", "",
    ]  # fmt: skip
    assert stop.finish() == ""
    other = StopText(("<END>",))
    assert other.feed("a<EN") + other.finish() == "a<EN"


@pytest.mark.parametrize(
    ("text", "start", "expected"),
    [("ab<x>", 0, 2), ("ab<", 0, 2), ("ab<y", 0, 4), ("<x><", 1, 3), ("", 0, 0), ("<x", 1, 2)],
)
def test_the_first_possible_marker_is_found_even_if_only_begun(
    text: str, start: int, expected: int
) -> None:
    assert first_possible(text, ("<x>",), start) == expected
