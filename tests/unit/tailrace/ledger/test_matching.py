"""Calls that a conversation continues, and its tokens."""

from __future__ import annotations

import json
import random

import msgspec
import numpy as np
import pytest

from tailrace.chat import Renderer
from tailrace.ledger import Ledger, UnknownCompletionError
from tailrace_protos.base import as_int32, as_uint8
from tailrace_protos.chat import ChatMessage, ToolCall
from tailrace_protos.session import ExportStyle, LedgerNode
from tailrace_protos.weights import ModelCard
from tests.unit.tailrace.chat import families
from tests.unit.tailrace.chat.families import MISTRAL, QWEN, TOOLS, call, encoded, renderer
from tests.unit.tailrace.ledger.calls import assistant, new_ledger, node, sampled, say, text, user


def test_a_conversation_goes_on_with_the_recorded_tokens_and_the_new_messages() -> None:
    ledger = new_ledger()
    first, reply = say(ledger, [user("q")], assistant("a"), "one")
    second, _ = say(ledger, [user("q"), reply, user("more")], assistant("b"), "two")
    assert second.parent_id == "one"
    assert second.messages == (user("more"),)
    assert text(second.inserted_ids) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert second.prompt_ids.tolist() == [
        *first.prompt_ids.tolist(),
        *sampled(assistant("a")).token_ids.tolist(),
        *second.inserted_ids.tolist(),
    ]
    assert ledger.counts()["num_forks"] == 0
    assert ledger.messages("two") == (user("q"), assistant("a"), user("more"), assistant("b"))


def test_a_reply_is_the_recorded_one_however_its_arguments_are_spelled() -> None:
    ledger = new_ledger()
    meant = ChatMessage("assistant", "", (call("search", {"query": "x", "limit": 3}),))
    _, reply = say(ledger, [user("q")], meant, "one", TOOLS)
    (made,) = reply.tool_calls
    respelled = json.dumps({"limit": 3, "query": "x"}, indent=2)
    theirs = ChatMessage("assistant", "\n", (ToolCall(made.id, "search", respelled),))
    result = ChatMessage("tool", "42", tool_call_id=made.id)
    prompt = ledger.prepare([user("q"), theirs, result], TOOLS)
    assert (prompt.parent_id, prompt.messages, prompt.is_fork) == ("one", (result,), False)


def test_numbers_of_arguments_may_come_back_as_javascript_spells_them() -> None:
    ledger = new_ledger()
    written = '{"a": 2.0, "b": 1e2, "c": 12345678901234567890, "d": -0.0, "e": 0.1}'
    meant = ChatMessage("assistant", "", (ToolCall("", "search", written),))
    _, reply = say(ledger, [user("q")], meant, "one", TOOLS)
    (made,) = reply.tool_calls
    respelled = '{"a":2,"b":100,"c":12345678901234567000,"d":0,"e":0.1}'
    result = ChatMessage("tool", "42", tool_call_id=made.id)
    for arguments, is_same in ((respelled, True), (respelled.replace("0.1", "0.2"), False)):
        theirs = ChatMessage("assistant", "", (ToolCall(made.id, "search", arguments),))
        prompt = ledger.prepare([user("q"), theirs, result], TOOLS)
        assert (prompt.parent_id == "one", prompt.is_fork) == (is_same, not is_same)


def test_of_equal_replies_the_one_with_the_same_tools_is_continued() -> None:
    ledger = new_ledger()
    say(ledger, [user("q")], assistant("Yes."), "without")
    _, reply = say(ledger, [user("q")], assistant("Yes."), "with", TOOLS)
    for tools, parent in ((TOOLS, "with"), ((), "without")):
        prompt = ledger.prepare([user("q"), reply, user("more")], tools)
        assert (prompt.parent_id, prompt.is_fork) == (parent, False)


@pytest.mark.parametrize(
    "edit",
    [
        {"content": "other"},
        {"tool_calls": (ToolCall("another_id", "now", "{}"),)},
        {"tool_calls": ()},
        {"role": "user"},
    ],
)
def test_a_changed_reply_is_another_message(edit: dict[str, object]) -> None:
    ledger = new_ledger()
    meant = ChatMessage("assistant", "So:", (call("now", {}),))
    _, reply = say(ledger, [user("q")], meant, "one", TOOLS)
    theirs = msgspec.structs.replace(reply, **edit)
    prompt = ledger.prepare([user("q"), theirs, user("and?")], TOOLS)
    assert prompt.parent_id == ""
    assert len(prompt.messages) == 3
    assert prompt.is_fork is (theirs.role == "assistant")


def test_an_edited_reply_forks_and_is_never_trained() -> None:
    # q -> a -> q2 -> b is recorded; the client sends q a q2 B q3
    ledger = new_ledger()
    _, a = say(ledger, [user("q")], assistant("a"), "one")
    _, _ = say(ledger, [user("q"), a, user("q2")], assistant("b"), "two")
    edited = assistant("B, as the client has it")
    prompt, _ = say(ledger, [user("q"), a, user("q2"), edited, user("q3")], assistant("c"), "three")
    assert prompt.parent_id == "one"
    assert prompt.is_fork
    assert prompt.messages == (user("q2"), edited, user("q3"))
    assert ledger.counts()["num_forks"] == 1
    rows = {row.row_id: row for row in ledger.rows(ExportStyle.CONCAT)}
    assert set(rows) == {"two", "three"}
    trained = [text(as_int32(row.token_ids)[as_uint8(row.loss_mask) != 0]) for row in rows.values()]
    assert trained == ["a<|im_end|>b<|im_end|>", "c<|im_end|>"]


def test_an_edited_question_branches_where_it_differs() -> None:
    ledger = new_ledger()
    _, a = say(ledger, [user("q")], assistant("a"), "one")
    say(ledger, [user("q"), a, user("q2")], assistant("b"), "two")
    branch, _ = say(ledger, [user("q"), a, user("q2, edited")], assistant("c"), "three")
    assert branch.parent_id == "one"
    assert not branch.is_fork
    fresh = ledger.prepare([user("another q"), a, user("q2")])
    assert fresh.parent_id == ""
    assert fresh.is_fork, "text of a reply that nobody sampled after this question is inserted"


def test_a_new_conversation_is_no_fork() -> None:
    ledger = new_ledger()
    say(ledger, [user("q")], assistant("a"), "one")
    other = ledger.prepare([ChatMessage("system", "You are a sub-agent."), user("q")])
    assert (other.parent_id, other.is_fork) == ("", False)


def test_a_first_conversation_may_begin_with_examples() -> None:
    prompt = new_ledger().prepare([user("q"), assistant("an example"), user("q2")])
    assert (prompt.parent_id, prompt.is_fork) == ("", False)


def test_repeating_a_question_makes_siblings_and_answers_lead_to_their_own_tokens() -> None:
    ledger = new_ledger()
    prompt = ledger.prepare([user("q")])
    for name, answer in (("one", "a"), ("two", "b"), ("three", "a")):
        ledger.record(prompt, sampled(assistant(answer)), assistant(answer), name)
    assert ledger.prepare([user("q"), assistant("b"), user("on")]).parent_id == "two"
    assert ledger.prepare([user("q"), assistant("a"), user("on")]).parent_id == "one"
    say(ledger, [user("q"), assistant("a"), user("on")], assistant("c"), "four")
    deep = ledger.prepare([user("q"), assistant("a"), user("on"), assistant("c"), user("and on")])
    assert deep.parent_id == "four"


def thoughtful(ledger: Ledger) -> ChatMessage:
    _, reply = say(ledger, [user("q")], assistant("a", reasoning="hm"), "one")
    assert reply.reasoning == "hm"
    return reply


def test_kept_reasoning_stays_in_the_tokens_when_the_client_drops_it() -> None:
    ledger = new_ledger("keep")
    thoughtful(ledger)
    prompt = ledger.prepare([user("q"), assistant("a"), user("more")])
    assert prompt.parent_id == "one"
    assert not prompt.is_fork
    assert "<think>\nhm\n</think>\n\na<|im_end|>\n" in text(prompt.prompt_ids)


def test_forked_reasoning_is_rendered_away_when_the_client_drops_it() -> None:
    ledger = new_ledger("fork")
    thoughtful(ledger)
    prompt = ledger.prepare([user("q"), assistant("a"), user("more")])
    assert (prompt.parent_id, prompt.is_fork, prompt.is_rendered_whole) == ("one", True, True)
    assert prompt.messages == (user("more"),)
    assert prompt.prompt_ids is prompt.inserted_ids
    assert "hm" not in text(prompt.prompt_ids)
    ledger.record(prompt, sampled(assistant("b")), assistant("b"), "two")
    ledger.set_reward(1.0)
    assert [row.reward for row in ledger.rows(ExportStyle.INDIVIDUAL, 0.5)] == [0.5, 1.0]
    onward = ledger.prepare([user("q"), assistant("a"), user("more"), assistant("b"), user("on")])
    assert (onward.parent_id, onward.is_fork) == ("two", False), "no thoughts are left to drop"


def test_forked_reasoning_is_rendered_away_when_the_template_drops_it() -> None:
    ledger = new_ledger("fork")
    reply = thoughtful(ledger)
    prompt = ledger.prepare([user("q"), reply, user("more")])
    assert prompt.is_rendered_whole
    assert "hm" not in text(prompt.prompt_ids)


def test_forked_reasoning_goes_on_while_client_and_template_show_it() -> None:
    ledger = new_ledger("fork")
    meant = ChatMessage("assistant", "", (call("now", {}),), reasoning="hm")
    _, reply = say(ledger, [user("q")], meant, "one", TOOLS)
    result = ChatMessage("tool", "noon", tool_call_id=reply.tool_calls[0].id)
    prompt = ledger.prepare([user("q"), reply, result], TOOLS)
    assert (prompt.parent_id, prompt.is_rendered_whole) == ("one", False)


def test_changed_thoughts_are_another_reply() -> None:
    ledger = new_ledger("keep")
    thoughtful(ledger)
    prompt = ledger.prepare([user("q"), assistant("a", reasoning="what?"), user("more")])
    assert (prompt.parent_id, prompt.is_fork) == ("", True)


def test_other_tools_are_told_by_rendering_anew() -> None:
    ledger = new_ledger()
    _, reply = say(ledger, [user("q")], assistant("a"), "one", TOOLS)
    prompt = ledger.prepare([user("q"), reply, user("more")], ())
    assert (prompt.parent_id, prompt.is_rendered_whole, prompt.is_fork) == ("one", True, True)
    assert "<tools>" not in text(prompt.prompt_ids)


def counting_renderer() -> Renderer:
    files = families.card(QWEN).tokenizer_files
    source = "{{ messages | length }} messages\n" + files["chat_template.jinja"].decode()
    return Renderer.from_model_card(ModelCard(b"{}", {**files, "chat_template.jinja": source.encode()}))


def test_a_template_that_cannot_be_appended_to_forks_and_is_counted() -> None:
    ledger = Ledger(counting_renderer())
    _, a = say(ledger, [user("q")], assistant("a"), "one")
    prompt, _ = say(ledger, [user("q"), a, user("more")], assistant("b"), "two")
    assert text(prompt.prompt_ids).startswith("3 messages")
    assert prompt.is_rendered_whole
    assert ledger.counts()["num_forks"] == 1
    ledger.set_reward(1.0)
    assert [row.reward for row in ledger.rows(ExportStyle.INDIVIDUAL, 1.0)] == [1.0, 1.0]


def test_a_template_that_moves_the_tools_forks_only_when_it_does_so() -> None:
    # tools stand before the last question: a result of a tool can be appended, a question cannot
    files = families.card(MISTRAL).tokenizer_files
    source = files["chat_template.jinja"].decode()
    moving = source.replace("{%- if tools -%}{{- '[AVAIL", "{%- if false -%}{{- '[AVAIL").replace(
        "{{- '[INST]' + m",
        "{%- set later = rest[loop.index0 + 1:] | selectattr('role', 'equalto', 'user') | list -%}"
        "{%- if tools and not later -%}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) -}}{%- endif -%}"
        "{{- '[INST]' + m",
    )
    assert moving.count("AVAILABLE_TOOLS") > source.count("AVAILABLE_TOOLS") // 2
    ours = Renderer.from_model_card(ModelCard(b"{}", {**files, "chat_template.jinja": moving.encode()}))
    ledger = Ledger(ours)
    messages = [user("q")]

    def reply_with(meant: ChatMessage, name: str) -> None:
        prompt = ledger.prepare(messages, TOOLS)
        generation = sampled(meant)
        ids = encoded(MISTRAL, MISTRAL.write(meant))
        generation = generation.__class__(
            ids, np.zeros(len(ids), np.float32), (), generation.finish_reason, None, 0
        )
        parsed = ours.parse_reply(ids, TOOLS)
        ledger.record(prompt, generation, parsed, name)
        messages.append(parsed.message)

    reply_with(ChatMessage("assistant", "", (call("now", {}),)), "one")
    messages.append(ChatMessage("tool", "noon", tool_call_id="abcdefghi"))
    assert not ledger.prepare(messages, TOOLS).is_fork
    reply_with(assistant("It is noon."), "two")
    messages.append(user("and now?"))
    assert ledger.prepare(messages, TOOLS).is_rendered_whole


def test_token_level_callers_continue_by_exact_prefix() -> None:
    ledger = new_ledger()
    first = ledger.prepare_tokens(np.array([1, 2, 3], np.int32))
    assert (first.parent_id, first.inserted_ids.tolist(), first.is_fork) == ("", [1, 2, 3], False)
    ledger.add(node("one", "", [1, 2, 3], [4, 5]))
    ledger.add(node("two", "one", [6], [7]))
    onward = ledger.prepare_tokens(np.array([1, 2, 3, 4, 5, 6, 7, 8], np.int32))
    assert (onward.parent_id, onward.inserted_ids.tolist(), onward.is_fork) == ("two", [8], False)
    again = ledger.prepare_tokens(np.array([1, 2, 3], np.int32))
    assert (again.parent_id, again.inserted_ids.tolist(), again.is_fork) == ("", [1, 2, 3], False)
    other = ledger.prepare_tokens(np.array([9, 9], np.int32))
    assert (other.parent_id, other.is_fork) == ("", False)


@pytest.mark.parametrize(
    ("prompt", "parent_id"), [([1, 2, 3, 4, 99, 6], ""), ([1, 2, 3, 4, 5, 6, 99, 8], "one")]
)
def test_a_reply_encoded_anew_forks_whatever_its_length(prompt: list[int], parent_id: str) -> None:
    ledger = new_ledger()
    ledger.add(node("one", "", [1, 2, 3], [4, 5]))
    ledger.add(node("two", "one", [6], [7]))
    found = ledger.prepare_tokens(np.array(prompt, np.int32))
    assert (found.parent_id, found.is_fork) == (parent_id, True)
    assert found.prompt_ids.tolist() == prompt


def test_a_call_recorded_twice_is_recorded_once() -> None:
    ledger = new_ledger()
    prompt = ledger.prepare([user("q")])
    first = ledger.record(prompt, sampled(assistant("a")), assistant("a"), "one")
    second = ledger.record(prompt, sampled(assistant("something else")), assistant("other"), "one")
    assert second == first
    assert len(ledger.nodes) == 1
    assert ledger.num_sampled == len(sampled(assistant("a")).token_ids)


def test_malformed_tool_calls_are_counted() -> None:
    ledger = new_ledger()
    say(ledger, [user("q")], assistant('<tool_call>{"name": </tool_call>'), "one")
    assert ledger.counts()["num_malformed_tool_calls"] == 1


def test_unknown_calls_are_named() -> None:
    ledger = new_ledger()
    with pytest.raises(UnknownCompletionError, match="no last call: 0 calls"):
        ledger.set_reward(1.0)
    with pytest.raises(UnknownCompletionError, match="no call 'x'"):
        ledger.mask("x", "because")
    with pytest.raises(UnknownCompletionError):
        ledger.add(node("b", "gone", [1], [2]))
    with pytest.raises(ValueError, match="at least one message"):
        ledger.prepare([])
    with pytest.raises(ValueError, match="at least one token"):
        ledger.prepare_tokens(np.empty(0, np.int32))


@pytest.mark.parametrize("seed", range(40))
def test_a_ledger_restored_from_its_nodes_is_the_same_ledger(seed: int) -> None:
    chance = random.Random(seed)
    ledger = new_ledger()
    conversations: list[list[ChatMessage]] = [[user("q")]]
    for number in range(chance.randint(1, 12)):
        messages = list(chance.choice(conversations))
        thought = chance.choice(["", "hm"])
        _, reply = say(ledger, messages, assistant(chance.choice("abc"), thought), f"c{number}")
        kept = reply if chance.random() < 0.7 else assistant(chance.choice(["edited", reply.content]))
        conversations.append([*messages, kept, user(chance.choice("xyz"))])
        if chance.random() < 0.4:
            ledger.set_reward(chance.random(), f"c{chance.randint(0, number)}")
        if chance.random() < 0.1:
            ledger.mask(f"c{chance.randint(0, number)}", "lost")
    wire = msgspec.msgpack.encode(ledger.nodes)
    nodes = msgspec.msgpack.decode(wire, type=tuple[LedgerNode, ...])
    restored = Ledger.restore(renderer(QWEN), nodes)
    assert restored.nodes == ledger.nodes
    assert restored.counts() == ledger.counts()
    assert restored.num_sampled == ledger.num_sampled
    assert restored.messages() == ledger.messages()
    for style in ExportStyle:
        assert restored.rows(style, 0.9) == ledger.rows(style, 0.9)
    for messages in conversations:
        ours, theirs = ledger.prepare(messages), restored.prepare(messages)
        assert np.array_equal(ours.prompt_ids, theirs.prompt_ids)
        assert (ours.parent_id, ours.messages) == (theirs.parent_id, theirs.messages)
