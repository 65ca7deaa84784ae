"""The policy model: packed rows in, log-probabilities and entropies of targets out."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tailrace_learner.core.batch.packing import PackedBatch
from tailrace_learner.core.model.logprobs import token_logprobs
from tailrace_learner.core.model.shards import local


@dataclass(frozen=True, slots=True)
class PolicyModel:
    """A causal LM without output bias or logit transformations (the loader checks this)."""

    model: Any  # transformers.PreTrainedModel
    device: torch.device
    temperature: float
    logprob_chunk_tokens: int
    autocast: bool = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Trained parameters, tied ones once."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Log-probability [M] and entropy [M] of the batch's targets, in packed order."""
        return self.predict(self.hidden(batch), batch)

    def hidden(self, batch: PackedBatch) -> Tensor:
        """Last hidden state [M, H] before each target, which predicts it."""
        packed = batch.packed
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            states: Tensor = self.model.base_model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                packed_rows=packed,
                cu_seq_lens_q=packed.cu_seqlens,
                cu_seq_lens_k=packed.cu_seqlens,
                max_length_q=packed.max_len,
                max_length_k=packed.max_len,
            ).last_hidden_state
        return states[0].index_select(0, batch.hidden_index)

    def predict(self, hidden: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Log-probability [M] and entropy [M] of the targets that `hidden` [M, H] predicts."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return token_logprobs(
            hidden,
            weight.to(hidden.dtype),
            batch.target_ids,
            temperature=self.temperature,
            chunk_tokens=self.logprob_chunk_tokens,
            bfloat16=self.autocast,
        )


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
