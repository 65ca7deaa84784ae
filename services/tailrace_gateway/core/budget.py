"""How many tokens a call may sample: what it asks for, within what is left of its session.

A session bounds the tokens sampled over all its calls and the length of each conversation. Calls in
flight at once do not see each other's tokens; the choices of one call share what is left.
"""

from __future__ import annotations

from tailrace_gateway.core.errors import BudgetSpentError, ContextOverflowError
from tailrace_protos.session import SessionLimits


def reply_budget(
    limits: SessionLimits, num_sampled: int, num_prompt: int, num_choices: int, wanted: int | None
) -> int:
    """Tokens that each choice may have, at least one; raises where none is left."""
    room = limits.max_episode_tokens - num_prompt
    if room <= 0:
        raise ContextOverflowError(num_prompt, limits.max_episode_tokens)
    left = (limits.max_new_tokens - num_sampled) // num_choices
    if left <= 0:
        raise BudgetSpentError(num_sampled, limits.max_new_tokens)
    return min(room, left) if wanted is None else min(room, left, wanted)


def call_seed(
    session_seed: int | None, request_seed: int | None, ordinal: int, choice: int
) -> int | None:
    """Seed of one choice; `ordinal` counts the session's calls. None: not seeded.

    A seed in the request fixes its choices wherever the request comes in the session.
    """
    if request_seed is not None:
        return _mix(request_seed, choice) if choice else request_seed & _MASK
    return None if session_seed is None else _mix(_mix(session_seed, ordinal + 1), choice)


_MASK = (1 << 63) - 1


def _mix(seed: int, number: int) -> int:
    """SplitMix64 of the seed moved on by `number` steps."""
    mixed = (seed + (number + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) & _MASK
