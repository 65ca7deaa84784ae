"""Values of tokens by a model, row by row, without gradient."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.batch.packing import PackedBatch, micro_batches, pack
from tailrace_learner.core.batch.rows import TrainingRow


def passes_of(rows: Sequence[TrainingRow], config: LearnerConfig) -> list[list[TrainingRow]]:
    """Rows of one forward pass each."""
    shares = config.shares_prefixes
    return list(micro_batches(rows, config.max_tokens_per_micro_batch, share_prefixes=shares))


def row_values(
    parts: Sequence[Sequence[TrainingRow]],
    ask: Callable[[PackedBatch], Tensor],
    device: torch.device,
    config: LearnerConfig,
) -> Iterator[tuple[TrainingRow, NDArray[np.float32]]]:
    """Each row of `parts` with the values [M] of its targets; `ask` gets one part at a time."""
    for part in parts:
        batch = pack(part, device, share_prefixes=config.shares_prefixes)
        with torch.no_grad():
            answers = ask(batch).float().cpu().numpy()
        yield from zip(batch.rows, np.split(answers, batch.target_offsets[1:-1]), strict=True)
