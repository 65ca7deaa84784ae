"""A chat model's files without a model: bytes as tokens, merged into words by no rule; plain ChatML."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tailrace.chat import Renderer
from tailrace_protos.weights import ModelCard

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REPLY = "The quick brown fox jumps over the lazy dog, then it naps a bit."  # 64 tokens and an end


@cache
def model_card() -> ModelCard:
    """Model card, as the learner would write it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")]
    )
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    return ModelCard(b"{}", files)


@cache
def renderer() -> Renderer:
    """Renders for that model."""
    return Renderer.from_model_card(model_card())


def reply_ids() -> NDArray[np.int32]:
    """Tokens that the engine samples."""
    return renderer().reply_ids(REPLY)


def text_of(ids: NDArray[np.int32]) -> str:
    """Text of prompt ids."""
    return renderer().decode(ids)
