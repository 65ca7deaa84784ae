"""Tokenizer for a tiny model of a small generated catalogue: one token per word.

Names of products and prices are a beginning and digits, which recur in those of other products: a
model can read and write the name of a product that training never shows. Spaces are not encoded: a
decoded reply has one space between its words, which the environment accepts.
"""

from collections.abc import Iterator
from pathlib import Path

from tailrace_envs.webshop.environment import INVALID_NOTE
from tailrace_envs.webshop.generated import KINDS, NUM_TITLES
from tailrace_envs.webshop.pages import BACK, BUY, DETAILS, NEXT, PREVIOUS, SEPARATOR
from tailrace_envs.word_tokenizer import any_of, build_word_tokenizer

_PHRASES = (
    "search[words]", "search[", "click[", "]", SEPARATOR.strip(), BACK, NEXT, PREVIOUS, BUY, *DETAILS,
    "instruction:", "available actions:", "i am looking for", "and price lower than", "dollars",
    INVALID_NOTE.strip().lower(), "\n", ":", ",", "page", "of", "results", "chosen", "rated",
    "(", ")", "with", "and", "a", "that is", "good",
)  # fmt: skip
MAX_NUMBER = 60


def build_webshop_tokenizer(directory: str | Path) -> Path:
    """Writes the tokenizer's files; `AutoTokenizer` loads the directory."""
    words = [*_PHRASES, *_words()]
    pattern = rf"{any_of(_PHRASES)}|\$?\d+\.\d\d|[a-z]+\d*|[0-9.]+"
    return build_word_tokenizer(
        directory,
        words,
        pattern=pattern,
        max_length=4096,
        drops_spaces=True,
        endings=(*map(str, range(10)), ".00"),
    )


def _words() -> Iterator[str]:
    """Words of generated products, goals and pages, besides the phrases."""
    for kind in KINDS:
        yield from (kind.query, *kind.attributes, *kind.options)
        for values in kind.options.values():
            yield from values
    yield from (f"b{tens:02d}" for tens in range(NUM_TITLES // 10))  # of products b000 to b179
    yield from (f"${digit}" for digit in range(1, 10))  # of $5.00 and $57.00
    yield from (f"{limit:.2f}" for limit in range(10, 110, 10))
    yield from (f"{rating:.1f}" for rating in range(1, 6))
    yield from (str(number) for number in range(MAX_NUMBER))
