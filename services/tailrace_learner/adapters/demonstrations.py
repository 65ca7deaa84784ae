"""Rows of a warm start, from the function that the user names."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tailrace.chat import Renderer
from tailrace.config import ChatArgs, ConfigError
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.import_path import load_object
from tailrace_learner.config import WarmStart
from tailrace_learner.core.batch.rows import TrainingRow, demonstration_row
from tailrace_protos.weights import ModelCard

_KEY = "learner.warm_start.demonstrations"
_SPARE_SHARE = 0.1  # asked for beyond what is needed: rows with an empty mask are left out


def demonstrations(
    warm: WarmStart, card: ModelCard, chat: ChatArgs, seed: int
) -> Iterator[TrainingRow]:
    """Usable rows, lazily; `ConfigError` when the function fails or yields something else."""
    make = load_object(warm.demonstrations, _KEY)
    num_episodes = round(warm.num_steps * warm.batch_size * (1.0 + _SPARE_SHARE))
    try:
        with foreign_code(_KEY):
            renderer = Renderer.from_model_card(card, chat)
            pairs = iter(make(renderer, seed=seed, num_episodes=num_episodes, **warm.options))
    except ForeignCodeError as error:
        raise ConfigError(str(error)) from error
    for index in range(num_episodes):
        try:
            with foreign_code(_KEY):
                pair = next(pairs, None)
                if pair is None:
                    return
                token_ids, loss_mask = (np.asarray(part) for part in pair)
                row = demonstration_row(
                    f"demo-{index}", token_ids.astype(np.int64), loss_mask.astype(np.uint8)
                )
        except ForeignCodeError as error:
            raise ConfigError(str(error)) from error
        if row is not None:
            yield row
