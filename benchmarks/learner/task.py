"""Common parts of our side and TRL's: the model, the rows and the digits task.

Needs nothing but numpy, so that TRL's environment can import it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Ids 0 to 255 are bytes, 256 pads, 257 ends a text.
PAD_ID, END_ID, VOCAB_SIZE = 256, 257, 258
MODEL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "pad_token_id": PAD_ID,
    "eos_token_id": END_ID,
    "bos_token_id": None,
}
ROWS_PER_PASS = 8  # of batches that are padded


class Sample(NamedTuple):
    """One rollout as learners get it."""

    prompt: NDArray[np.int64]  # [P]
    completion: NDArray[np.int64]  # [C]
    logprobs: NDArray[np.float32]  # [C] when it was sampled
    advantage: float


def ragged_samples(count: int = 64, seed: int = 0) -> list[Sample]:
    """Prompts of 16 to 48 tokens, completions with a long tail: median 64, at most 512."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(np.log(64), 0.9, count)).clip(8, 512).astype(int)
    prompts = rng.integers(16, 49, count)
    return [
        _sample(rng, rng.integers(0, 256, prompt), size)
        for prompt, size in zip(prompts, sizes, strict=True)
    ]


def grouped_samples(groups: int = 8, group_size: int = 8, seed: int = 0) -> list[Sample]:
    """Groups of answers to one prompt each; prompts are 75% of all tokens."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(groups):
        sizes = np.exp(rng.normal(np.log(64), 0.4, group_size)).clip(16, 160).astype(int)
        prompt = rng.integers(0, 256, 3 * round(sizes.mean()))
        samples += [_sample(rng, prompt, size) for size in sizes]
    return samples


def _sample(rng: np.random.Generator, prompt: NDArray[np.int64], size: int) -> Sample:
    logprobs = rng.normal(-5.5, 0.1, size).astype(np.float32)
    return Sample(prompt, rng.integers(0, 256, size), logprobs, float(rng.normal()))


def num_tokens(samples: list[Sample]) -> int:
    """Tokens of all rows, as they are counted in tokens per second on every side."""
    return sum(len(sample.prompt) + len(sample.completion) for sample in samples)


# The digits task: be rewarded for the share of digits in what is said.
PROMPTS = ("Say a number.", "Count for me.", "Which year is it?", "What does it cost?")
GROUP_SIZE = 8
MAX_NEW_TOKENS = 32
LEARNING_RATE = 2e-3
GOAL = 0.9
MAX_STEPS = 150


def digit_share(text: str) -> float:
    """The reward."""
    return sum(char in "0123456789" for char in text) / max(len(text), 1)


def text_of(token_ids: list[int]) -> str:
    """The text of sampled ids; what is no text counts as characters all the same."""
    return bytes(token for token in token_ids if token < PAD_ID).decode("utf-8", "replace")
