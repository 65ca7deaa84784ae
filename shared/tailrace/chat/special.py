"""Special tokens of a tokenizer, to be found as texts in rendered conversations."""

import re

from tokenizers import Tokenizer


class SpecialTokens:
    """Added tokens. `ids`: special tokens' ids by text. `texts`: all added tokens' texts by id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self.texts: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.ids: dict[str, int] = {
            token.content: token_id for token_id, token in added.items() if token.special
        }
        longest_first = sorted(filter(None, self.ids), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Start and end of each special token in `text`, in order."""
        return [found.span() for found in self._pattern.finditer(text)]

    def end_of_one_at(self, text: str, position: int) -> int:
        """End of the special token that starts at `position`; `position` if there is none."""
        found = self._pattern.match(text, position)
        return found.end() if found else position
