"""The special tokens of a tokenizer, as texts to look for in rendered conversations."""

from __future__ import annotations

import re

from tokenizers import Tokenizer


class SpecialTokens:
    """`ids`: token id by text. `texts`: all added tokens, special or not, by id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self.texts: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.ids: dict[str, int] = {
            token.content: token_id for token_id, token in added.items() if token.special
        }
        longest_first = sorted(filter(None, self.ids), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Begin and end of each special token in `text`, in order."""
        return [found.span() for found in self._pattern.finditer(text)]

    def end_of_one_at(self, text: str, position: int) -> int:
        """Where the special token that begins at `position` ends; `position` if none begins there."""
        found = self._pattern.match(text, position)
        return found.end() if found else position
