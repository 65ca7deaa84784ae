"""Detects rows whose arrays contradict each other or the model, and names the flaw.

Raw bytes come from other processes: code that reads them as numbers checks here first. A row without
a flaw may still be of no use (not finite, stale, overlong); other modules decide that.
"""

import enum
from collections.abc import Callable, Mapping

import numpy as np

from tailrace.provenance import covers_trained_tokens
from tailrace_protos.base import as_float32, as_int32, as_int64, as_uint8
from tailrace_protos.trajectory import TokenRow

COUNT = "num_malformed_episodes"  # and of one flaw: followed by "/" and its name
_ROUNDING = 1e-3  # by which an engine's log-probability of a certain token may exceed 0
_ENTRY_BYTES = {
    "token_ids": 4,
    "inference_logprobs": 4,
    "turn_ends": 4,
    "turn_rewards": 4,
    "turn_returns": 4,
    "turn_hashes": 8,
}


class Flaw(enum.StrEnum):
    """Kind of a contradiction in a row."""

    BYTES = "bytes"  # an array's bytes are no whole number of its entries
    LENGTHS = "lengths"  # arrays of tokens disagree in length, or those of turns
    TOKEN_IDS = "token_ids"  # an id is none of the model's
    LOGPROBS = "logprobs"  # a sampled token's log-probability is above 0
    TURN_ENDS = "turn_ends"  # not ascending, or outside of the row
    SPANS = "spans"  # do not cover the sampled tokens, or not known: a record of another version


def flaw_of(row: TokenRow, vocabulary: int) -> Flaw | None:
    """First flaw of a row, or None; ids are below `vocabulary` unless it is 0."""
    if any(len(getattr(row, name)) % size for name, size in _ENTRY_BYTES.items()):
        return Flaw.BYTES
    return next((flaw for flaw, shows in _SIGNS.items() if shows(row, vocabulary)), None)


def flaws(counts: Mapping[str, int]) -> dict[str, int]:
    """Number of malformed episodes by the name of their flaw."""
    return {
        name.removeprefix(f"{COUNT}/"): n for name, n in counts.items() if name.startswith(f"{COUNT}/")
    }


def _lengths_differ(row: TokenRow, vocabulary: int) -> bool:
    num_tokens, num_turns = len(as_int32(row.token_ids)), len(as_int32(row.turn_ends))
    arrays = (as_uint8(row.loss_mask), as_float32(row.inference_logprobs))
    if any(len(array) != num_tokens for array in arrays):
        return True
    if len(as_float32(row.turn_rewards)) != num_turns:
        return True
    return any(
        len(array) not in (0, num_turns)
        for array in (as_int64(row.turn_hashes), as_float32(row.turn_returns))
    )


def _strange_ids(row: TokenRow, vocabulary: int) -> bool:
    ids = as_int32(row.token_ids)
    return bool(len(ids) and (ids.min() < 0 or 0 < vocabulary <= ids.max()))


def _positive_logprobs(row: TokenRow, vocabulary: int) -> bool:
    """Tells whether a log-probability is positive; infinite ones are masked token by token."""
    inference_logprobs = as_float32(row.inference_logprobs)
    sampled = as_uint8(row.loss_mask) != 0
    return bool(np.any(sampled & (inference_logprobs > _ROUNDING) & np.isfinite(inference_logprobs)))


def _disordered_turns(row: TokenRow, vocabulary: int) -> bool:
    ends = as_int32(row.turn_ends)
    if not len(ends):
        return False
    is_ascending = bool(np.all(ends[:-1] <= ends[1:]))
    return not is_ascending or bool(ends[0] < 0 or ends[-1] > len(as_int32(row.token_ids)))


_SIGNS: dict[Flaw, Callable[[TokenRow, int], bool]] = {
    Flaw.LENGTHS: _lengths_differ,  # first: the others compare entry with entry
    Flaw.TOKEN_IDS: _strange_ids,
    Flaw.LOGPROBS: _positive_logprobs,
    Flaw.TURN_ENDS: _disordered_turns,
    Flaw.SPANS: lambda row, vocabulary: not covers_trained_tokens(row),
}
