"""Stop strings: decodes the tokens of a call one by one and searches the text.

Invariants: text is never turned back into tokens; a string that spans several tokens, also tokens that
another server sampled for the same call, is found at the token that completes it.
"""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class StopStrings:
    """Search for the stop strings of one call."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], continued_ids: Iterable[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=False)
        self._stops = stops
        self._keep = max(len(stop) for stop in stops) - 1
        self._tail = ""
        for token_id in continued_ids:
            self.push(token_id)

    def push(self, token_id: int) -> str | None:
        """The stop string that this token completes, the earliest in the text if there are several."""
        text = self._stream.step(self._tokenizer, token_id)
        if not text:
            return None
        window = self._tail + text
        found = [(window.find(stop), stop) for stop in self._stops if stop in window]
        self._tail = window[-self._keep :] if self._keep else ""
        return min(found)[1] if found else None
