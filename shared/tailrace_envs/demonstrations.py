"""Demonstrations for a warm start: random replies of a novice that knows the rules.

They teach to read the task and to answer in its format, never how to win: what a policy achieves, also
without sampling noise, is then what reinforcement learning taught it. A row is a whole episode. The
same renderer as in the agents service makes its tokens. Tasks come from the train split only.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from tailrace.chat import Renderer
from tailrace.sdk.env import Env

E_contra = TypeVar("E_contra", bound=Env, contravariant=True)
E = TypeVar("E", bound=Env)

DemonstrationRow = tuple[list[int], list[int]]  # token ids and loss mask, both [T]


class Novice(Protocol[E_contra]):
    """Lists replies; it may read the environment's state."""

    def sensible_replies(self, env: E_contra) -> Sequence[str]:
        """Replies that have an effect and do not lose at once; empty if there is none."""
        ...

    def any_replies(self, env: E_contra) -> Sequence[str]:
        """Replies in the right format; never empty."""
        ...


def demonstrations_of(
    env_type: Callable[..., E], novice: Novice[E], *, random_moves: float
) -> Callable[..., Iterator[DemonstrationRow]]:
    """Makes a function for `learner.warm_start.demonstrations`.

    A reply is uniformly one of the sensible ones. `random_moves`: default share of replies that are
    uniformly one of any.
    """
    default = random_moves

    def demonstrations(
        renderer: Renderer,
        *,
        seed: int,
        num_episodes: int,
        random_moves: float = default,
        **options: Any,
    ) -> Iterator[DemonstrationRow]:
        """Yields `num_episodes` rows. `options`: keys of `env_config`; the split is always train."""
        if not 0.0 <= random_moves <= 1.0:
            raise ValueError("random_moves must be 0 to 1")
        if options.get("split", "train") != "train":
            raise ValueError("demonstrations come from the train split: leave out `split`")
        make = partial(env_type, **{**options, "split": "train"})
        yield from play_demonstrations(
            make, novice, renderer, seed=seed, num_episodes=num_episodes, random_moves=random_moves
        )

    return demonstrations


def play_demonstrations(
    make: Callable[[], E],
    novice: Novice[E],
    renderer: Renderer,
    *,
    seed: int,
    num_episodes: int,
    random_moves: float,
) -> Iterator[DemonstrationRow]:
    """Yields `num_episodes` rows; the mask is 1 on replies."""
    env = make()
    random = np.random.default_rng(seed)
    for _ in range(num_episodes):
        yield _episode(renderer, env, novice, random, random_moves)


def _episode(
    renderer: Renderer,
    env: E,
    novice: Novice[E],
    random: np.random.Generator,
    random_moves: float,
) -> DemonstrationRow:
    token_ids: list[int] = []
    loss_mask: list[int] = []
    observation, _ = env.reset(seed=int(random.integers(2**31)))
    done = False
    while not done:
        choices = () if random.random() < random_moves else novice.sensible_replies(env)
        choices = choices or novice.any_replies(env)
        reply = choices[int(random.integers(len(choices)))]
        inserted = renderer.observation_ids(observation, not token_ids)
        sampled = renderer.reply_ids(reply)
        token_ids += [*inserted.tolist(), *sampled.tolist()]
        loss_mask += [0] * len(inserted) + [1] * len(sampled)
        observation, _, terminated, truncated, _ = env.step(reply)
        done = terminated or truncated
    return token_ids, loss_mask
