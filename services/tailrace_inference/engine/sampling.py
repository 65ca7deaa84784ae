"""Samples one token per row of logits, for all rows together.

The random number of a row is a pure function of its key and of the number of tokens that its call has
sampled, so it does not depend on the batch. Sampling inverts the cumulative distribution: one uniform
number per row. Log-probabilities, of the sampled token and of the likeliest tokens, are those after the
temperature and before the filters. Greedy rows (temperature 0) report those at temperature 1.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31 = np.uint64(30), np.uint64(27), np.uint64(31)
# 23 random bits: then u * total < total also holds after float32 rounding.
_SHIFT_TO_23_BITS = np.uint64(41)
_COLD = np.float32(0.01)  # temperatures below it are applied to the distance from the likeliest token
_SCALES = np.finfo(np.float32)


class SamplingRows(NamedTuple):
    """Sampling parameters of the rows [n] that sample in this step."""

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    min_p: NDArray[np.float32]
    key: NDArray[np.uint64]
    counter: NDArray[np.int64]


def uniforms(key: NDArray[np.uint64], counter: NDArray[np.int64]) -> NDArray[np.float32]:
    """Numbers in [0, 1) [n] that depend only on (key, counter): splitmix64, twice."""
    state = _mix(key + _GOLDEN) + (counter.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    bits = _mix(_mix(state)) >> _SHIFT_TO_23_BITS
    return bits.astype(np.float32) * np.float32(2.0**-23)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> _SHIFT_30)) * _MIX_1
    state = (state ^ (state >> _SHIFT_27)) * _MIX_2
    return state ^ (state >> _SHIFT_31)


def scaled_logprobs(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Log-probabilities [n, vocabulary] float32 after the temperature; greedy rows are not scaled."""
    scaled = logits.float()
    if (rows.temperature != 1.0).any():
        scale = np.where(rows.temperature == 0.0, np.float32(1.0), rows.temperature)
        if (is_cold := scale < _COLD).any():  # a quotient may exceed float32
            shift = torch.from_numpy(is_cold).to(logits.device).unsqueeze(1)
            scaled = torch.where(shift, scaled - scaled.amax(dim=-1, keepdim=True), scaled)
        scale = scale.clip(_SCALES.tiny, _SCALES.max)
        scaled = scaled / torch.from_numpy(scale).to(logits.device).unsqueeze(1)
    return torch.log_softmax(scaled, dim=-1)


def choose(logprobs: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Tokens [n] int64 drawn from `logprobs` [n, vocabulary], and their log-probabilities [n]."""
    device = logprobs.device
    greedy = rows.temperature == 0.0
    if greedy.all():
        tokens = logprobs.argmax(dim=-1, keepdim=True)
    else:
        tokens = draw(filtered(logprobs.exp(), rows), uniforms(rows.key, rows.counter))
        if greedy.any():
            is_greedy = torch.from_numpy(greedy).to(device).unsqueeze(1)
            tokens = torch.where(is_greedy, logprobs.argmax(dim=-1, keepdim=True), tokens)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


def draw(weights: Tensor, uniform: NDArray[np.float32]) -> Tensor:
    """Index [n, 1] drawn from unnormalised `weights` [n, V]; a weight of 0 is never drawn."""
    cumulative = weights.cumsum(dim=-1)
    target = torch.from_numpy(uniform).to(weights.device).unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=weights.shape[1] - 1)


def filtered(probs: Tensor, rows: SamplingRows) -> Tensor:
    """`probs` [n, V], with tokens that top-k, then top-p, then min-p exclude set to 0."""
    sorts = (rows.top_k > 0) | (rows.top_p < 1.0)
    if sorts.any():
        index = torch.from_numpy(np.flatnonzero(sorts)).to(probs.device)
        probs = probs.index_copy(0, index, _top(probs.index_select(0, index), rows, sorts))
    if (rows.min_p > 0.0).any():
        floor = torch.from_numpy(rows.min_p).to(probs.device).unsqueeze(1)
        probs = torch.where(probs < floor * probs.amax(dim=-1, keepdim=True), 0.0, probs)
    return probs


def _top(probs: Tensor, rows: SamplingRows, chosen: NDArray[np.bool_]) -> Tensor:
    """Applies top-k, then top-p to the rest, for the chosen rows; at least one token stays."""
    vocab_size = probs.shape[1]
    top_k = rows.top_k[chosen]
    limit = torch.from_numpy(np.where(top_k > 0, top_k, vocab_size)).to(probs.device).unsqueeze(1)
    top_p = torch.from_numpy(rows.top_p[chosen]).to(probs.device).unsqueeze(1)
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab_size, device=probs.device)
    ordered = torch.where(rank < limit, ordered, 0.0)
    before = ordered.cumsum(dim=-1) - ordered
    keep = (before < top_p * ordered.sum(dim=-1, keepdim=True)) | (rank == 0) | (top_p >= 1.0)
    return torch.zeros_like(probs).scatter_(1, order, torch.where(keep, ordered, 0.0))
