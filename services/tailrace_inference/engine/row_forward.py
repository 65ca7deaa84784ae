"""Forward of models whose layers do not take paged keys and values: one sequence at a time.

Serves hybrids with recurrent layers, other attention, and whatever else transformers computes. The
engine's cache holds token ids in place of keys, so that kept prefixes, copies and preemption work as
for other models; the sequence of a row is read from there. `recompute` computes it anew for each
token, which is right for every causal model. `continue` keeps the cache that the model makes itself
and computes new tokens only; `step` does so one token at a time.
"""

from collections import OrderedDict
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tailrace.model_probe import forget_lengths
from tailrace_inference.engine.attention import AttentionStep, History, ShapeProbe
from tailrace_inference.engine.kv_cache import KVShape

RowMode = Literal["continue", "step", "recompute"]
ROW_MODES: tuple[RowMode, ...] = ("continue", "step", "recompute")
TOKEN_LAYERS = [KVShape(1, 1, 1)]  # a token id in place of a key

_CACHES = ("past_key_values", "cache_params")  # names of a model's cache, given and returned


class _Kept(NamedTuple):
    """A model's own cache of a sequence."""

    tokens: Tensor  # [n]
    name: str  # of the argument
    cache: Any


class RowForward:
    """Computes logits sequence by sequence, with the model's own attention and cache."""

    def __init__(self, model: nn.Module, mode: RowMode, max_kept_tokens: int) -> None:
        self._model = model
        self._mode = mode
        self._max_kept_tokens = max_kept_tokens
        self._kept: OrderedDict[int, _Kept] = OrderedDict()

    def logits(
        self, ids: Tensor, positions: Tensor, last: Tensor, step: AttentionStep | ShapeProbe
    ) -> Tensor:
        """See `Forward`."""
        assert isinstance(step, AttentionStep)
        asked = last.tolist()
        found: dict[int, Tensor] = {}
        for history in step.histories(ids):
            end = history.first + history.num_new
            start = len(history.tokens) - history.num_new
            mine = [flat for flat in asked if history.first <= flat < end]
            places = [flat - history.first + start for flat in mine]
            if places:
                found |= zip(mine, self._row(history, places), strict=True)
        if not found:  # all rows are in the middle of their prompts
            return torch.empty(0, 0, device=ids.device)
        return torch.stack([found[flat] for flat in asked])

    def refresh(self) -> None:
        """See `Forward`; caches of earlier weights are dropped."""
        self._kept.clear()

    def _row(self, history: History, places: list[int]) -> Tensor:
        """Logits [n, vocabulary] after the tokens at `places` of a sequence."""
        tokens = history.tokens
        if self._mode == "recompute":
            return self._whole(tokens)[places]
        kept = self._known(history, places[0])
        num_known = 0 if kept is None else len(kept.tokens)
        cache = {} if kept is None else {kept.name: kept.cache}
        rest = tokens[num_known:]
        logits: list[Tensor] = []
        for part in (rest,) if self._mode == "continue" or kept is None else torch.split(rest, 1):
            out = self._model(input_ids=part.unsqueeze(0), use_cache=True, **cache)
            name = next((name for name in _CACHES if out.get(name) is not None), None)
            if name is None:  # it made no cache this time
                return self._whole(tokens)[places]
            cache = {name: out[name]}
            logits.append(out.logits[0])
        ((name, made),) = cache.items()
        self._keep(history.key, _Kept(tokens, name, made))
        wanted: Tensor = torch.cat(logits)[[place - num_known for place in places]]
        return wanted

    def _known(self, history: History, end: int) -> _Kept | None:
        """Takes what is kept of the first tokens of a sequence, at most `end` of them."""
        kept = self._kept.pop(history.key, None)
        if kept is None or not 0 < len(kept.tokens) <= end:
            return None
        return kept if torch.equal(kept.tokens, history.tokens[: len(kept.tokens)]) else None

    def _whole(self, tokens: Tensor) -> Tensor:
        forget_lengths(self._model)
        logits: Tensor = self._model(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0]
        return logits

    def _keep(self, key: int, kept: _Kept) -> None:
        self._kept[key] = kept
        total = sum(len(each.tokens) for each in self._kept.values())
        while total > self._max_kept_tokens and len(self._kept) > 1:
            total -= len(self._kept.popitem(last=False)[1].tokens)
