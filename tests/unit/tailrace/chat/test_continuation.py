"""Text inserted after a reply, with unusual templates."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tailrace.chat import (
    ChatArgs,
    Renderer,
    TemplateError,
    TemplateNotAppendableError,
    load_parsers,
)
from tailrace.config import ConfigError
from tailrace.ledger import Ledger
from tailrace_protos.chat import ChatMessage, ToolCall
from tailrace_protos.weights import ModelCard
from tests.unit.tailrace.chat import families
from tests.unit.tailrace.chat.families import HARMONY, LLAMA3, MISTRAL, QWEN, TOOLS, Family, call

USER, REPLY, NEXT = ChatMessage("user", "q"), ChatMessage("assistant", "a"), ChatMessage("user", "n")
CALLS = ChatMessage("assistant", "", (call("now", {}),))
RESULT = ChatMessage("tool", "noon", tool_call_id="abcdefghi")

ROLES_END_TURNS = (  # no end of turn: the next role's token is what a model stops with
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPACE_BEFORE_END = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
PLAIN_TEXT = (
    "{% for m in messages %}{{ m.role + ': ' + m.content }}{% for call in m.tool_calls or [] %}"
    "{{ '!' + call.function.name + call.function.arguments | tojson + '!' }}{% endfor %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
SYSTEM_IN_LAST_QUESTION = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]"
    "{% if messages[0].role == 'system' and not messages[loop.index0 + 1:] %}{{ messages[0].content }}"
    "{% endif %}{{ m.content }}[/INST]{% elif m.role == 'assistant' %}{{ m.content + '</s>' }}"
    "{% endif %}{% endfor %}"
)
END_AT_THE_END = (  # an end of text that longer conversations do not have
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|endoftext|>{% endif %}"
)
ARGUMENTS_AS_TEXT = (
    "{% for m in messages %}<|im_start|>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}"
    "{% endfor %}<|im_end|>{% endfor %}"
)


def made(
    source: str, family: Family = QWEN, chat: ChatArgs | None = None, **config: object
) -> Renderer:
    files = families.card(family).tokenizer_files
    settings = {**json.loads(files["tokenizer_config.json"]), **config}
    changed = {
        "chat_template.jinja": source.encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
    }
    return Renderer.from_model_card(ModelCard(b"{}", {**files, **changed}), chat or ChatArgs())


def inserted(
    renderer: Renderer,
    reply: ChatMessage = REPLY,
    new: ChatMessage = NEXT,
    family: Family = QWEN,
    *,
    closed: bool = True,
    system: bool = False,
) -> str:
    before = (ChatMessage("system", "s"), USER) if system else (USER,)
    ids = renderer.continuation_ids((*before, reply), (new,), (), closed=closed)
    return families.tokenizer(family).decode(ids.tolist(), skip_special_tokens=False)


def token_id(family: Family, token: str) -> int:
    return int(families.tokenizer(family).token_to_id(token))


def test_a_role_that_ends_the_turn_before_is_not_doubled() -> None:
    ours = made(ROLES_END_TURNS)
    assert ours.is_closed(token_id(QWEN, "<|im_start|>"))
    assert inserted(ours) == "user\nn<|im_start|>assistant\n"
    assert inserted(ours, closed=False) == "<|im_start|>user\nn<|im_start|>assistant\n"
    assert inserted(ours, CALLS, RESULT) == "tool\nnoon<|im_start|>assistant\n"


def test_an_end_of_turn_behind_a_space_is_not_doubled() -> None:
    ours = made(SPACE_BEFORE_END, MISTRAL)
    assert ours.is_closed(token_id(MISTRAL, "</s>"))
    assert inserted(ours, family=MISTRAL) == "[INST] n [/INST]"
    assert inserted(ours, family=MISTRAL, closed=False) == "</s>[INST] n [/INST]"


def test_ordinary_text_that_closes_replies_is_inserted_behind_calls_too() -> None:
    ours = made(PLAIN_TEXT)
    assert inserted(ours) == "\nuser: n\nassistant: "
    assert inserted(ours, CALLS, RESULT) == "\ntool: noon\nassistant: "


def test_an_end_of_text_that_longer_conversations_lack_is_not_taken_for_the_end_of_turn() -> None:
    assert inserted(made(END_AT_THE_END)) == "\n<|im_start|>user\nn<|im_end|>\n<|im_start|>assistant\n"
    assert inserted(made(END_AT_THE_END), closed=False).startswith("<|im_end|>\n<|im_start|>user")


def test_a_system_message_that_wanders_forbids_appending_only_where_there_is_one() -> None:
    ours = made(SYSTEM_IN_LAST_QUESTION, MISTRAL)
    assert inserted(ours, family=MISTRAL) == "[INST]n[/INST]"
    with pytest.raises(TemplateNotAppendableError, match="cannot be appended to"):
        inserted(ours, family=MISTRAL, system=True)


@pytest.mark.parametrize(
    ("family", "reply", "new", "closed", "expected"),
    [
        (QWEN, CALLS, RESULT, True, "\n<|im_start|>user\n<tool_response>\nnoon\n</tool_response>"),
        (LLAMA3, CALLS, RESULT, False, "<|eom_id|><|start_header_id|>ipython<|end_header_id|>\n\n"),
        (LLAMA3, REPLY, NEXT, False, "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nn"),
        (MISTRAL, CALLS, RESULT, True, '[TOOL_RESULTS]{"content": "noon", "call_id": "abcdefghi"}'),
        (HARMONY, CALLS, RESULT, False, "<|call|><|start|>functions.now to=assistant"),
        (HARMONY, REPLY, NEXT, False, "<|end|><|start|>user<|message|>n<|end|><|start|>assistant"),
        (HARMONY, REPLY, NEXT, True, "<|start|>user<|message|>n<|end|><|start|>assistant"),
    ],
)  # fmt: skip
def test_each_family_closes_and_answers_in_its_own_way(
    family: Family, reply: ChatMessage, new: ChatMessage, closed: bool, expected: str
) -> None:
    text = inserted(families.renderer(family), reply, new, family, closed=closed)
    assert text.startswith(expected)


def test_ends_of_calls_stop_the_engine_and_ends_of_thoughts_do_not() -> None:
    stops = families.renderer(HARMONY).stop_token_ids
    tokens = {families.tokenizer(HARMONY).id_to_token(stop) for stop in stops}
    assert tokens == {"<|return|>", "<|call|>"}
    assert families.renderer(HARMONY).is_closed(token_id(HARMONY, "<|end|>"))


def test_several_results_in_a_row_are_joined_as_the_template_joins_them() -> None:
    ids = families.renderer(QWEN).continuation_ids((USER, CALLS), (RESULT, RESULT), TOOLS, closed=True)
    assert families.tokenizer(QWEN).decode(ids.tolist(), skip_special_tokens=False) == (
        "\n<|im_start|>user\n<tool_response>\nnoon\n</tool_response>\n<tool_response>\nnoon\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_no_rendering_could_hold_is_the_templates_own_error() -> None:
    ledger = Ledger(families.renderer(MISTRAL))
    with pytest.raises(TemplateError, match="must alternate"):
        ledger.prepare([USER, REPLY, NEXT, NEXT])
    with pytest.raises(TemplateNotAppendableError, match="must alternate"):
        families.renderer(MISTRAL).continuation_ids((USER, REPLY), (NEXT, NEXT), closed=True)


def test_arguments_are_given_as_the_template_reads_them() -> None:
    ours = made(ARGUMENTS_AS_TEXT)
    ids = ours.opening_ids((USER, ChatMessage("assistant", "", (ToolCall("x", "now", '{"a": 1}'),))))
    text = families.tokenizer(QWEN).decode(ids.tolist(), skip_special_tokens=False)
    assert 'now<｜tool▁sep｜>{"a": 1}' in text
    ids = families.renderer(QWEN).opening_ids((USER, CALLS, RESULT))
    text = families.tokenizer(QWEN).decode(ids.tolist(), skip_special_tokens=False)
    assert '{"name": "now", "arguments": {}}' in text


def test_template_args_reach_the_template() -> None:
    source = "{{ mood }}" + ROLES_END_TURNS
    ours = made(source, chat=ChatArgs(template_args={"mood": "calm"}))
    text = families.tokenizer(QWEN).decode(ours.opening_ids((USER,)).tolist())
    assert text.startswith("calm")


def spoken(ours: Renderer, text: str, family: Family = QWEN) -> ChatMessage:
    ids = families.encoded(family, text)
    return ours.parse_reply(ids).message


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (
            "<tool_call>{{ call.function | tojson }}</tool_call>",
            '<tool_call>{"name": "now"}</tool_call>',
        ),
        (
            "<function={{ call.function.name }}>{% for k, v in call.function.arguments | items %}"
            "<parameter={{ k }}>{{ v }}</parameter>{% endfor %}</function>",
            "<function=now></function>",
        ),
        (
            "<tool_call>{{ call.function.name }}\n{% for k, v in call.function.arguments | items %}"
            "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>",
            "<tool_call>now\n</tool_call>",
        ),
        (
            '{{ \'{"name": "\' + call.function.name + \'", "parameters": \' }}'
            "{{ call.function.arguments | tojson }}}",
            '{"name": "now", "parameters": {}}',
        ),
        ("[TOOL_CALLS]{{ [call.function] | tojson }}", '[TOOL_CALLS][{"name": "now"}]'),
        (
            "{{ '<｜tool▁call▁begin｜>' + call.function.name }}"
            "{{ '<｜tool▁sep｜>' + call.function.arguments }}",
            "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        ),
        (
            "[{{ call.function.name }}({% for k, v in call.function.arguments | items %}"
            "{{ k }}={{ v | tojson }}{% endfor %})]",
            "[now()]",
        ),
    ],
)
def test_auto_finds_the_parser_that_reads_what_the_template_writes(written: str, said: str) -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.content }}{% for call in m.tool_calls or [] %}"
        + written
        + "{% endfor %}<|im_end|>{% endfor %}"
    )
    assert [found.name for found in spoken(made(source), said).tool_calls] == ["now"]
    silent = made(source, chat=ChatArgs(tool_parser="none"))
    assert spoken(silent, said) == ChatMessage("assistant", said)


def test_auto_finds_no_calls_where_the_template_writes_none() -> None:
    text = '<tool_call>{"name": "now"}</tool_call>'
    assert spoken(made(END_AT_THE_END), text) == ChatMessage("assistant", text)
    forced = made(END_AT_THE_END, chat=ChatArgs(tool_parser="hermes"))
    assert [found.name for found in spoken(forced, text).tool_calls] == ["now"]


def test_auto_reads_thoughts_where_template_or_tokenizer_know_them() -> None:
    text = "<think>hm</think>a"
    assert spoken(made(END_AT_THE_END), text).reasoning == "hm"
    assert spoken(made(END_AT_THE_END, MISTRAL), text, MISTRAL).content == text
    told = ChatArgs(reasoning_parser="none")
    assert spoken(made(END_AT_THE_END, chat=told), text).content == text


def test_gpt_oss_calls_need_harmony_channels() -> None:
    with pytest.raises(ConfigError, match=r"set chat\.reasoning_parser to harmony"):
        load_parsers(ChatArgs(tool_parser="gpt_oss", reasoning_parser="think"))


def test_a_reply_that_ends_at_once_is_an_empty_message_that_goes_on() -> None:
    ours = families.renderer(QWEN)
    ledger = Ledger(ours)
    end = np.array([token_id(QWEN, "<|im_end|>")], np.int32)
    assert ours.parse_reply(end).message == ChatMessage("assistant", "")
    assert inserted(ours, ChatMessage("assistant", "")).startswith("\n<|im_start|>user")
    assert len(ledger.nodes) == 0
