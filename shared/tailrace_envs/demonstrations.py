"""Demonstrations for a warm start: random replies of a novice that knows the rules.

They teach to read the task and to answer in its format, never how to win: what a policy achieves, also
without sampling noise, is then what reinforcement learning taught it. A row is a whole episode, or with
`history_turns` one turn behind the prompt that the policy of such a run sees. The same renderer as in
the agents service makes its tokens. Tasks come from the train split only.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from tailrace.chat import Renderer
from tailrace.sdk.env import Env, opening_text

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
        history_turns: int | None = None,
        variants: Sequence[Mapping[str, Any]] = ({},),
        **options: Any,
    ) -> Iterator[DemonstrationRow]:
        """Yields the rows of `num_episodes` episodes. `options`: keys of `env_config`; the split is
        always train. `variants`: keys that differ between several environments, which are played in
        turn. `history_turns`: as that of the run's environments; null: whole episodes."""
        if not 0.0 <= random_moves <= 1.0:
            raise ValueError("random_moves must be 0 to 1")
        if history_turns is not None and history_turns < 0:
            raise ValueError("history_turns must not be negative; null is whole episodes")
        if not variants:
            raise ValueError("variants must name at least one environment; leave it out for one")
        chosen = [{**options, **variant} for variant in variants]
        if any(one.get("split", "train") != "train" for one in chosen):
            raise ValueError("demonstrations come from the train split: leave out `split`")
        envs = cycle([env_type(**{**one, "split": "train"}) for one in chosen])
        random = np.random.default_rng(seed)
        for env in islice(envs, num_episodes):
            yield from _rows(_episode(renderer, env, novice, random, random_moves), history_turns)

    return demonstrations


class _Turn(NamedTuple):
    """Token ids of an observation, beginning a prompt and continuing one, and of the reply."""

    opening: list[int]
    observation: list[int]
    reply: list[int]


def _episode(
    renderer: Renderer,
    env: E,
    novice: Novice[E],
    random: np.random.Generator,
    random_moves: float,
) -> list[_Turn]:
    turns: list[_Turn] = []
    observation, info = env.reset(seed=int(random.integers(2**31)))
    kept = opening_text(observation, info)
    done = False
    while not done:
        choices = () if random.random() < random_moves else novice.sensible_replies(env)
        choices = choices or novice.any_replies(env)
        reply = choices[int(random.integers(len(choices)))]
        opening = kept + observation if turns else observation
        turns.append(
            _Turn(
                renderer.observation_ids(opening, True).tolist(),
                renderer.observation_ids(observation, not turns).tolist(),
                renderer.reply_ids(reply).tolist(),
            )
        )
        observation, _, terminated, truncated, _ = env.step(reply)
        done = terminated or truncated
    return turns


def _rows(turns: list[_Turn], history_turns: int | None) -> Iterator[DemonstrationRow]:
    """Yields the episode as one row, or each turn with the turns before it that the policy sees."""
    if history_turns is None:
        yield _joined(turns, num_context=0)
        return
    for number in range(len(turns)):
        num_context = min(history_turns, number)
        yield _joined(turns[number - num_context : number + 1], num_context)


def _joined(turns: list[_Turn], num_context: int) -> DemonstrationRow:
    """Joins turns; replies count, except those of the first `num_context` turns."""
    token_ids: list[int] = []
    loss_mask: list[int] = []
    for number, turn in enumerate(turns):
        inserted = turn.observation if number else turn.opening
        token_ids += [*inserted, *turn.reply]
        loss_mask += [0] * len(inserted) + [int(number >= num_context)] * len(turn.reply)
    return token_ids, loss_mask
