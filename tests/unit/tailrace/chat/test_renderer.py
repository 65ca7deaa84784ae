"""Appended turns have the tokens of the conversation that is rendered at once, with any template."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tailrace.chat import ChatTemplate, Renderer, TemplateError, TemplateNotAppendableError
from tailrace_protos.chat import ChatMessage
from tailrace_protos.weights import ModelCard

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_WITH_SYSTEM = "<|im_start|>system\nYou help.<|im_end|>\n" + CHATML
LLAMA_LIKE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|head|>' + m['role'] + '<|/head|>\n\n' + m['content'] | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
GENERATION_BLOCK = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}<|im_start|>{{ m.content }}<|im_start|>{% endif %}{% endfor %}"
)
PLAIN_TEXT = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
APPENDABLE = [CHATML, CHATML_WITH_SYSTEM, LLAMA_LIKE, GENERATION_BLOCK]
COUNTING = "{{ messages | length }} messages:\n" + CHATML
FORGETTING = (
    "{% for m in messages %}<|im_start|>{% if loop.last or m.role == 'user' %}{{ m.content }}"
    "{% endif %}<|im_end|>{% endfor %}"
)
THINKING = (  # opens a thought in the generation prompt that later renderings do not have
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
NAMED = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|bos|>", "<|eos|>"]


@cache
def tokenizer() -> Tokenizer:
    """Byte-level BPE with merges across line feeds and spaces, as real ones have."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    corpus = ["user\n\nassistant\n\n\nLeft Right \n up", "go left\n\n go right\n", "user\n  user\n"] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(corpus, trainer)
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return made


def card(template: str | None, **config: object) -> ModelCard:
    settings_ = {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}, **config}
    files = {
        "tokenizer.json": tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps(settings_).encode(),
    }
    if template is not None:
        files["chat_template.jinja"] = template.encode()
    return ModelCard(b"{}", files)


@cache
def renderer(template: str) -> Renderer:
    return Renderer.from_model_card(card(template))


texts = st.text(alphabet=" \nabelfright.<>|", max_size=20)


@pytest.mark.parametrize("template", APPENDABLE)
@given(
    observations=st.lists(texts, min_size=1, max_size=4), reply=st.sampled_from(["Left", " up\n", "x"])
)
@settings(max_examples=40, deadline=None)
def test_appended_tokens_equal_the_whole_conversation_rendered_at_once(
    template: str, observations: list[str], reply: str
) -> None:
    ours = renderer(template)
    ids: list[int] = []
    messages: list[ChatMessage] = []
    for turn, observation in enumerate(observations):
        if turn:
            ids += ours.reply_ids(reply.strip()).tolist()
            messages.append(ChatMessage("assistant", reply.strip()))
        ids += ours.observation_ids(observation, first=turn == 0).tolist()
        messages.append(ChatMessage("user", observation))
    whole = ChatTemplate(template, NAMED, "test").render(messages, add_generation_prompt=True)
    assert tokenizer().decode(ids, skip_special_tokens=False) == whole
    at_once = tokenizer().encode(whole, add_special_tokens=False).ids
    if len(observations) == 1 or template == GENERATION_BLOCK:  # no merge may cross into a reply here
        assert ids == at_once


@pytest.mark.parametrize("template", APPENDABLE)
def test_a_reply_cut_by_its_budget_gets_the_end_of_turn_that_it_lacks(template: str) -> None:
    ours = renderer(template)
    ended, cut = ours.reply_ids("Left"), ours.reply_ids("Left")[:-1]
    assert ours.is_closed(int(ended[-1]))
    assert not ours.is_closed(int(cut[-1]))
    after_end = [*ended, *ours.observation_ids("next", first=False)]
    after_cut = [*cut, *ours.observation_ids("next", first=False, closed=False)]
    assert after_cut == after_end


def test_a_reply_ended_by_the_tokenizers_eos_is_still_closed_as_the_template_does() -> None:
    ours = renderer(CHATML)
    eos, end_of_turn = (tokenizer().token_to_id(token) for token in ("<|eos|>", "<|im_end|>"))
    assert ours.stop_token_ids == tuple(sorted((eos, end_of_turn)))
    assert not ours.is_closed(eos)


def test_the_models_own_config_may_name_further_ends() -> None:
    with_list = ModelCard(b'{"eos_token_id": [3, 4]}', card(CHATML).tokenizer_files)
    assert {3, 4} < set(Renderer.from_model_card(with_list).stop_token_ids)


def test_a_template_without_a_closing_token_relies_on_eos_and_inserts_its_text() -> None:
    ours = renderer(PLAIN_TEXT)
    assert ours.end_of_turn_id == -1
    inserted = ours.observation_ids("go", first=False)
    assert tokenizer().decode(inserted.tolist()) == "\nuser: go\nassistant: "


def test_replies_are_read_without_special_tokens() -> None:
    ours = renderer(CHATML)
    assert ours.decode(ours.reply_ids("Left")) == "Left"
    assert ours.decode(np.empty(0, np.int32)) == ""


def test_white_space_is_stripped_only_where_the_template_does_so() -> None:
    assert np.array_equal(
        renderer(LLAMA_LIKE).observation_ids(" a \n", first=True),
        renderer(LLAMA_LIKE).observation_ids("a", first=True),
    )
    assert len(renderer(CHATML).observation_ids(" a \n", first=True)) > len(
        renderer(CHATML).observation_ids("a", first=True)
    )


def test_rendered_ids_cannot_be_changed_by_who_gets_them() -> None:
    ids = renderer(CHATML).observation_ids("a", first=True)
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1


@pytest.mark.parametrize("template", [COUNTING, FORGETTING, THINKING])
def test_a_template_that_changes_earlier_turns_is_refused_by_name(template: str) -> None:
    ours = renderer(template)
    with pytest.raises(TemplateNotAppendableError, match=r"chat_template\.jinja: .*") as caught:
        ours.observation_ids("a", first=True)
    with pytest.raises(TemplateNotAppendableError):
        ours.require_plain_turns()
    assert caught.value.template == "chat_template.jinja"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}", "does not compile"),
        ("{{ raise_exception('no users here') }}", "no users here"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{{ ''.__class__.__mro__ }}", "cannot render"),
        (None, "the model has none"),
    ],
)
def test_an_unusable_template_is_an_error_that_says_why(template: str | None, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason):
        Renderer.from_model_card(card(template))


def test_template_files_that_cannot_be_read_are_named() -> None:
    files = {**card(CHATML).tokenizer_files, "chat_template.jinja": b"\xff"}
    with pytest.raises(TemplateError, match=r"cannot read chat_template\.jinja: "):
        Renderer.from_model_card(ModelCard(b"{}", files))
    with pytest.raises(TemplateError, match=r"chat_template of tokenizer_config\.json: KeyError"):
        Renderer.from_model_card(card(None, chat_template=[{"name": "default"}]))


def test_a_model_that_nothing_stops_is_refused() -> None:
    with pytest.raises(TemplateError, match="nothing ends a turn"):
        Renderer.from_model_card(card(PLAIN_TEXT, eos_token=None))


def test_a_model_without_a_fast_tokenizer_is_refused() -> None:
    with pytest.raises(TemplateError, match=r"tokenizer\.json is missing"):
        Renderer.from_model_card(ModelCard(b"{}", {}))


@pytest.mark.parametrize("entry", [CHATML, [{"name": "default", "template": CHATML}]])
def test_the_template_may_stand_in_the_tokenizers_config(entry: object) -> None:
    found = Renderer.from_model_card(card(None, chat_template=entry))
    assert np.array_equal(
        found.observation_ids("a", first=True), renderer(CHATML).observation_ids("a", first=True)
    )


@pytest.mark.parametrize("template", [*APPENDABLE, THINKING])
def test_given_replies_are_trained_to_their_end_of_turn_and_nothing_else_is(template: str) -> None:
    ours = renderer(template)
    messages = [
        ChatMessage("user", "go"),
        ChatMessage("assistant", "left"),
        ChatMessage("user", "and"),
        ChatMessage("assistant", "right"),
    ]
    trained: list[str] = []
    for chosen in ([False, True, False, True], [False, False, False, True]):
        rows = ours.supervised_rows(messages, (), chosen)
        parts = [ours.decode(ids[mask == 1]) for ids, mask in rows]
        trained.append("".join(parts).strip())
        for ids, mask in rows:
            places = np.flatnonzero(mask)
            assert not len(places) or ids[places[-1]] in ours.stop_token_ids
    assert trained == ["leftright", "right"]
    assert ours.supervised_rows(messages, (), [False] * 4) == []


def test_template_arguments_that_it_does_not_read_make_no_renderer_of_their_own() -> None:
    asks = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    ours = renderer(
        asks + "{% if add_generation_prompt %}{{ style }}<|im_start|>assistant\n{% endif %}"
    )
    assert ours.template_args({"style": "brief", "unread": 1}) == {"style": "brief"}
    brief = ours.with_template_args({"style": "brief"})
    assert brief.template_args({"style": "brief"}) == {}
    ids = brief.opening_ids([ChatMessage("user", "go")])
    assert tokenizer().decode(ids.tolist()).endswith("briefassistant\n")
