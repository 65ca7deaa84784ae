"""Left-padded sequences in one cache of the model's own, and the check that a model takes them.

Recurrent layers read padding, and rotary embeddings may depend on the longest sequence: the logits of
such a batch must be those of single sequences, or the model is refused. Special lengths are made short
and random weights are stirred for the check, as in `forward_check`.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.model_probe import forget_lengths, shortened, stirred, trial_length
from tailrace_inference.engine.attention import UnsupportedModelError
from tailrace_inference.engine.forward_check import TOLERANCE, drawn_sequences
from tailrace_inference.engine.kv_cache import Int64Array

_NUM_DECODED = 2
_NUM_DRAWS = 2


class PaddedCache:
    """Computes n sequences side by side; gives logits [n, vocabulary] after their last tokens."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._cache: Any = None
        self._mask = torch.zeros(0)  # [n, T] 1 where a token is, 0 where padding is

    def prefill(self, sequences: Sequence[NDArray[Any]]) -> Tensor:
        """Begins with these token ids."""
        lengths = [len(ids) for ids in sequences]
        ids = np.zeros((len(lengths), max(lengths)), np.int64)
        mask = np.zeros_like(ids)
        for place, tokens in enumerate(sequences):
            ids[place, -len(tokens) :] = tokens
            mask[place, -len(tokens) :] = 1
        self._mask = self._tensor(mask)
        return self._logits(ids, np.maximum(mask.cumsum(1) - 1, 0))

    def decode(self, tokens: Int64Array, lengths: Int64Array) -> Tensor:
        """Adds a token to each sequence; `lengths` [n] with it."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(lengths), 1)], dim=1)
        return self._logits(tokens[:, None], lengths[:, None] - 1)

    def keep(self, places: Int64Array) -> None:
        """Drops all other sequences."""
        kept = self._tensor(places)
        self._cache.batch_select_indices(kept)
        self._mask = self._mask.index_select(0, kept)

    def _logits(self, ids: Int64Array, positions: Int64Array) -> Tensor:
        output = self._model(
            input_ids=self._tensor(ids),
            attention_mask=self._mask,
            position_ids=self._tensor(positions),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = output.past_key_values
        logits: Tensor = output.logits[:, -1]
        return logits

    def _tensor(self, array: Int64Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


@torch.no_grad()
def check_padded(model: Any, *, is_stirred: bool) -> None:
    """Raises `UnsupportedModelError` if padded sequences of the model have other logits."""
    reason, longest = "", trial_length(model)
    try:
        with foreign_code("a padded batch"):
            for seed in range(_NUM_DRAWS):
                with shortened(model), stirred(model) if is_stirred else nullcontext():
                    reason = _difference(model, drawn_sequences(model, longest, seed))
                if not reason:
                    return
    except ForeignCodeError as error:
        reason = str(error)
    remedy = "set inference.engine to torch, which computes one sequence at a time where it must"
    raise UnsupportedModelError(str(model.config.model_type), f"{reason}: {remedy}", engine="hf")


def _difference(model: Any, sequences: Sequence[Tensor]) -> str:
    """Difference from single sequences, in words; empty if there is none."""
    expected = [_alone(model, ids) for ids in sequences]
    arrays = [ids.cpu().numpy() for ids in sequences]
    lengths = np.array([len(ids) - _NUM_DECODED for ids in arrays])
    padded = PaddedCache(model, sequences[0].device)
    found = [padded.prefill([ids[:end] for ids, end in zip(arrays, lengths, strict=True)])]
    wanted = [_at(expected, lengths - 1)]
    for _ in range(_NUM_DECODED):
        tokens = np.array([ids[end] for ids, end in zip(arrays, lengths, strict=True)])
        lengths = lengths + 1
        found.append(padded.decode(tokens, lengths))
        wanted.append(_at(expected, lengths - 1))
    padded.keep(np.array([0]))
    right = torch.cat(wanted)
    spread = (right - right.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-12)
    errors = (torch.cat(found).float() - right).norm(dim=-1) / spread
    dtype = next(model.parameters()).dtype
    error = float(errors.max() if dtype == torch.float32 else errors.mean())
    if error <= TOLERANCE[dtype]:
        return ""
    return f"a padded batch has other logits than single sequences, by {error:.2g} of their spread"


def _at(rows: Sequence[Tensor], places: Int64Array) -> Tensor:
    """Row [n, vocabulary] of each sequence at its place."""
    return torch.stack([each[place] for each, place in zip(rows, places, strict=True)])


def _alone(model: Any, ids: Tensor) -> Tensor:
    """Logits [T, vocabulary] of a sequence by itself."""
    forget_lengths(model)
    logits: Tensor = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
    forget_lengths(model)
    return logits.float()
