"""Sums and means over consecutive tokens that belong together."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Spans:
    """Consecutive tokens that belong together (rows, turns): `lengths` [S] >= 1, summing to M."""

    lengths: NDArray[np.int64]

    def sums(self, values: Tensor) -> Tensor:
        """The sum [M] of its span at every token, differentiable."""
        lengths = torch.from_numpy(self.lengths).to(values.device)
        index = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
        return values.new_zeros(len(lengths)).index_add(0, index, values)[index]

    def means(self, values: Tensor) -> Tensor:
        """The mean [M] of its span at every token, differentiable."""
        sizes = torch.from_numpy(np.repeat(self.lengths, self.lengths)).to(values)
        return self.sums(values) / sizes


NO_SPANS = Spans(np.zeros(0, np.int64))
