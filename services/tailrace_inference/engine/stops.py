"""Stop strings: decodes the tokens of a call one by one and searches the text.

Invariants: text is never turned back into tokens; a string that spans several tokens, also tokens that
another server sampled for the same call, is found at the token that completes it; tokens that are no
text (bytes that are no UTF-8) end no search and no engine, and cost no more than others.
"""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tailrace.foreign import ForeignCodeError, foreign_code

# Tokens whose text is incomplete, at most: the stream decodes all of them again with each one.
_MAX_HELD = 64


class StopStrings:
    """Search for the stop strings of one call."""

    _tail: str  # last letters of the text, in which a stop string may begin
    _num_held: int  # tokens whose text is incomplete

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], continued_ids: Iterable[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._keep = max(len(stop) for stop in stops) - 1
        self._begin()
        for token_id in continued_ids:
            self.push(token_id)

    def push(self, token_id: int) -> str | None:
        """The stop string that this token completes, the earliest in the text if there are several."""
        text = self._decoded(token_id)
        if not text:
            self._num_held += 1
            if self._num_held == _MAX_HELD:  # they are no text
                self._begin()
            return None
        self._num_held = 0
        window = self._tail + text
        found = [(window.find(stop), stop) for stop in self._stops if stop in window]
        self._tail = window[-self._keep :] if self._keep else ""
        return min(found)[1] if found else None

    def _decoded(self, token_id: int) -> str | None:
        """Text that a token adds, None while it is incomplete.

        A byte that is no text may change how tokens before it read (byte fallback: "\\n" and 0xFF are
        two unknown letters), which the stream takes as an error. The search begins again at the token.
        """
        try:
            with foreign_code("the tokenizer"):
                return self._stream.step(self._tokenizer, token_id)
        except ForeignCodeError:
            self._begin()
            return self._stream.step(self._tokenizer, token_id)

    def _begin(self) -> None:
        """Begins the search anew at the next token."""
        self._tail, self._num_held = "", 0
        self._stream = DecodeStream(skip_special_tokens=False)
