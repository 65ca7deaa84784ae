"""Simple players of an environment: what success a policy must exceed to have learnt something.

A player reads the environment's state and gives a reply. A built-in environment names its players in
`ENV_TYPES`; a class of yours has them as attribute `baselines`, by name; a Python function
that yields rows of a data set has them too, each as `(row, random) -> success`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from tailrace.sdk.env import Env

E_contra = TypeVar("E_contra", bound=Env, contravariant=True)
E = TypeVar("E", bound=Env)

_SEED = 0xBA5E


class Player(Protocol[E_contra]):
    """Replies in the current state of an environment."""

    def __call__(self, env: E_contra, random: np.random.Generator, /) -> str:
        """Returns the reply."""
        ...


def random_player(replies: Callable[[E], Sequence[str]]) -> Player[E]:
    """Makes a player that gives one of the `replies` to a state, uniformly at random."""
    return lambda env, random: one_of(replies(env), random)


def one_of(replies: Sequence[str], random: np.random.Generator) -> str:
    """Draws one reply uniformly."""
    return replies[int(random.integers(len(replies)))]


RowPlayer = Callable[[Mapping[str, Any], np.random.Generator], float]


def success_on_rows(
    players: Mapping[str, RowPlayer], rows: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Mean success of each player on rows of a data set; the same rows give the same numbers."""
    return {
        name: float(
            np.mean([player(row, np.random.default_rng([_SEED, n])) for n, row in enumerate(rows)])
        )
        for name, player in players.items()
    }


def success_of(
    players: Mapping[str, Player[Any]], make: Callable[[], Env], seeds: Iterable[int]
) -> dict[str, float]:
    """Mean success of each player on the tasks of `seeds`, one episode each.

    The same seeds give the same numbers. Where an environment reports no success, a positive sum of
    rewards is one.
    """
    tasks = list(seeds)
    found = {}
    for name, player in players.items():
        env = make()
        outcomes = [_success(env, player, seed) for seed in tasks]
        env.close()
        found[name] = float(np.mean(outcomes)) if outcomes else 0.0
    return found


def _success(env: Env, player: Player[Any], seed: int) -> float:
    random = np.random.default_rng([_SEED, seed])
    env.reset(seed=seed)
    info: dict[str, Any] = {}
    total, done = 0.0, False
    while not done:
        _, reward, terminated, truncated, info = env.step(player(env, random))
        total += float(reward)
        done = terminated or truncated
    return float(info.get("success", total > 0))
