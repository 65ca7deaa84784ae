"""The policy model: packed rows in, log-probabilities and entropies of targets out."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.batch.packing import PackedBatch, micro_batches, pack
from tailrace_learner.core.batch.rows import TrainingRow
from tailrace_learner.core.model.forward_path import ForwardPath, hidden_states, own_logits, path_of
from tailrace_learner.core.model.logprobs import logprobs_of_logits, token_logprobs


@dataclass(frozen=True, slots=True)
class PolicyModel:
    """A causal LM, computed on the path that was chosen for it (`forward_path`)."""

    model: Any  # transformers.PreTrainedModel
    device: torch.device
    temperature: float
    logprob_chunk_tokens: int
    autocast: bool = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Trained parameters, tied ones once."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def path(self) -> ForwardPath:
        """Way of rows through the model."""
        return path_of(self.model)

    def shares_prefixes(self, config: LearnerConfig) -> bool:
        """True if passes share prefixes: wanted, and right for this model."""
        return config.shares_prefixes and self.path.shares_prefixes

    def passes(self, rows: Sequence[TrainingRow], config: LearnerConfig) -> Iterator[list[TrainingRow]]:
        """Rows of one pass each."""
        return micro_batches(
            rows,
            config.max_tokens_per_micro_batch,
            share_prefixes=self.shares_prefixes(config),
            max_row_tokens=self.path.max_packed_tokens,
        )

    def pack(self, rows: Sequence[TrainingRow], config: LearnerConfig) -> PackedBatch:
        """Rows of one pass as a batch on the model's device."""
        return pack(rows, self.device, share_prefixes=self.shares_prefixes(config))

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Log-probability [M] and entropy [M] of the batch's targets, in packed order."""
        return self.predict(self.hidden(batch), batch)

    def hidden(self, batch: PackedBatch) -> Tensor:
        """Last hidden state [M, H] before each target, which predicts it."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            return hidden_states(self.model, batch)

    def predict(self, hidden: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Log-probability [M] and entropy [M] of the targets that `hidden` [M, H] predicts."""
        if path_of(self.model).head == "own":
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                return logprobs_of_logits(
                    partial(own_logits, self.model, bfloat16=self.autocast),
                    hidden,
                    batch.target_ids,
                    temperature=self.temperature,
                    chunk_tokens=self.logprob_chunk_tokens,
                )
        weight: Tensor = self.model.get_output_embeddings().weight
        return token_logprobs(
            hidden,
            weight.to(hidden.dtype),
            batch.target_ids,
            temperature=self.temperature,
            chunk_tokens=self.logprob_chunk_tokens,
            bfloat16=self.autocast,
        )


def row_values(
    policy: PolicyModel,
    parts: Sequence[Sequence[TrainingRow]],
    ask: Callable[[PackedBatch], Tensor],
    config: LearnerConfig,
) -> Iterator[tuple[TrainingRow, NDArray[np.float32]]]:
    """Each row of `parts` with the values [M] of its targets; `ask` gets one part at a time."""
    for part in parts:
        batch = policy.pack(part, config)
        with torch.no_grad():
            answers = ask(batch).float().cpu().numpy()
        yield from zip(batch.rows, np.split(answers, batch.target_offsets[1:-1]), strict=True)


def local(tensor: Tensor) -> Tensor:
    """Shard of this rank, sharing memory with the tensor; a whole tensor is its own shard."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    shard: Tensor = getattr(tensor, "ds_tensor", tensor)  # ZeRO stage 3 keeps it beside the weight
    return shard


class StartWeights:
    """Weights at the start of a step, kept when the step's first update is about to change them."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._kept: list[Tensor] = []
        self.is_kept = False

    @torch.no_grad()
    def keep(self) -> None:
        """Copies the current weights into the memory of the last copy."""
        current = self._current()
        if self._kept:
            torch._foreach_copy_(self._kept, current)
        else:
            self._kept = [tensor.clone() for tensor in current]
        self.is_kept = True

    def forget(self) -> None:
        """Drops the copy: the current weights are a step's start again."""
        self.is_kept = False

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Puts the kept weights into the model, for forward passes without gradient."""
        assert self.is_kept
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _current(self) -> list[Tensor]:
        return [local(parameter).detach() for parameter in self._parameters]

    @torch.no_grad()
    def _swap(self) -> None:
        for index, parameter in enumerate(self._parameters):
            kept = self._kept[index]
            if (shard := local(parameter)) is not parameter:
                # The code that gathers a shard reads it in place.
                now = shard.clone()
                shard.copy_(kept)
                kept.copy_(now)
            else:
                self._kept[index], parameter.data = parameter.data, kept
