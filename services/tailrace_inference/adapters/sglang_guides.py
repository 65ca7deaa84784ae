"""Guided replies in SGLang's scheduler: our matchers in the place of its grammar backends.

SGLang makes none without its tokenizer, and its own begin at the first token of a request, so that a
call which another server began could not go on. Ours mean the same as in the torch engine.
"""

from pathlib import Path
from typing import Any

import torch
from sglang.srt.constrained.base_grammar_backend import (
    BaseGrammarBackend,
    BaseGrammarObject,
    InvalidGrammarObject,
)
from sglang.srt.constrained.grammar_manager import GrammarManager
from torch import Tensor

from tailrace_inference.core.requests import InvalidRequestError
from tailrace_inference.engine.guided import GuideMatcher, Guides, read_guides


class _Grammar(BaseGrammarObject):  # type: ignore[misc]  # SGLang has no types here
    """The matcher of one request. Masks are true where a token is forbidden."""

    def __init__(self, matcher: GuideMatcher) -> None:
        super().__init__()
        self._matcher = matcher

    def accept_token(self, token: int) -> None:
        if not self._matcher.consume(token):
            raise ValueError(f"the guide does not allow token {token}")

    def rollback(self, k: int) -> None:
        self._matcher.rollback(k)

    def is_terminated(self) -> bool:
        return self._matcher.is_ended

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: Any) -> Tensor:
        return torch.zeros((batch_size, vocab_size), dtype=torch.bool)

    def fill_vocab_mask(self, vocab_mask: Tensor, idx: int) -> None:
        allowed = self._matcher.allowed
        if allowed.any():  # else whatever comes does not fit, and ends the request with an error
            vocab_mask[idx, : len(allowed)] = torch.from_numpy(~allowed)

    @staticmethod
    def move_vocab_mask(vocab_mask: Tensor, device: Any) -> Tensor:
        return vocab_mask.to(device, non_blocking=True)

    @staticmethod
    def apply_vocab_mask(logits: Tensor, vocab_mask: Tensor) -> None:
        logits[:, : vocab_mask.shape[1]].masked_fill_(vocab_mask, -torch.inf)


class _Backend(BaseGrammarBackend):  # type: ignore[misc]
    """Makes the grammar of a request at once: it takes milliseconds."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        super().__init__()
        self._folder, self._vocab_size = folder, vocab_size
        self._guides: Guides | None = None

    def get_cached_or_future_value(
        self, key: tuple[str, str], require_reasoning: bool
    ) -> tuple[BaseGrammarObject, bool]:
        if self._guides is None:
            self._guides = read_guides(self._folder, self._vocab_size)
        try:
            return _Grammar(self._guides.matcher_of(key[1])), True
        except InvalidRequestError as error:
            return InvalidGrammarObject(str(error)), True


class GuideManager(GrammarManager):  # type: ignore[misc]
    """SGLang's manager, whose requests have a `GuideSpec` in the place of an EBNF grammar."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        vocab_size = scheduler.model_config.vocab_size
        self.grammar_backend = _Backend(Path(scheduler.server_args.model_path), vocab_size)
