"""`HfEngine`: the modules of transformers as they are, a reference for any causal language model.

Calls that join together form a wave: one left-padded batch with a cache of its own, which shrinks as
calls end and goes when the last one has. A step gives each running call one token.

Invariants: room for the longest possible sequence of a call is reserved before it joins, so none is
preempted; a weight update drops all caches, and waves compute them again with the new weights.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tailrace_inference.config import WEIGHTS_DTYPES, InferenceConfig
from tailrace_inference.engine.driver import EngineDriver
from tailrace_inference.engine.forward import build_model, max_sequence
from tailrace_inference.engine.kv_cache import Int64Array
from tailrace_inference.engine.stepped import SteppedBase
from tailrace_inference.ports import EngineFeatures, EngineStats
from tailrace_protos.weights import ModelCard

_NO_BLOCKS: Int64Array = np.empty(0, np.int64)


class _Wave:
    """Rows that compute together; `cache` holds all tokens but the last of each, or is None."""

    def __init__(self, rows: Int64Array) -> None:
        self.rows = rows
        self.cache: Any = None
        self.mask: Tensor | None = None  # [n, T] 1 where a token is, 0 where padding is


class HfEngine(SteppedBase):
    """See `SteppedEngine`."""

    def __init__(
        self, config_json: bytes, config: InferenceConfig, tokenizer: Tokenizer | None = None
    ) -> None:
        self._model = model = build_model(config_json, config)
        vocab_size = int(model.config.get_text_config().vocab_size)
        super().__init__(model, next(model.parameters()).device, vocab_size, config, tokenizer)
        max_len = max_sequence(config, model.config, config.kv_cache_tokens)
        self._make_rows(max_len, 0, self._free)
        self._waves: list[_Wave] = []
        self._num_reserved = 0
        self._num_steps = self._num_prompt = self._num_computed = self._num_recomputed = 0
        self._num_read = 0

    def _on_new_weights(self, policy_version: int) -> None:
        self._forget_computed()

    def _forget_computed(self) -> None:
        for wave in self._waves:
            wave.cache = None

    def _cache_tensors(self) -> Iterable[Tensor]:
        return ()  # the waves held them

    def _release(self, episode_ids: Sequence[str]) -> None:
        pass  # no context outlives its call

    def _compute(self, now_s: float) -> None:
        self._admit(now_s)
        for wave in list(self._waves):
            self._advance(wave)
        self._num_steps += 1
        self._emitter.flush_due(self.policy_version, now_s)

    def _admit(self, now_s: float) -> None:
        """Forms a wave of the waiting calls that have room."""
        waiting, rows = self._intake.waiting, []
        while waiting and self._batch.has_room:
            if self._num_reserved + waiting[0].max_len > self._config.kv_cache_tokens:
                break
            call = waiting.popleft()
            self._num_reserved += call.max_len
            self._num_prompt += call.num_prompt
            rows.append(self._batch.add(call, _NO_BLOCKS, 0, self.policy_version, now_s))
        if rows:
            self._waves.append(_Wave(np.array(rows, np.int64)))

    @torch.inference_mode()
    def _advance(self, wave: _Wave) -> None:
        """Samples one token for each row of a wave."""
        self._num_read += int(self._batch.length[wave.rows].sum())
        logits = self._decode(wave) if wave.cache is not None else self._prefill(wave)
        self._sampler.take(wave.rows, logits, self.policy_version)

    def _prefill(self, wave: _Wave) -> Tensor:
        """Logits [n, vocabulary] after all tokens of the rows; fills the wave's cache."""
        lengths = self._batch.length[wave.rows]
        ids = np.zeros((len(lengths), int(lengths.max())), np.int64)
        mask = np.zeros_like(ids)
        for place, (row, length) in enumerate(zip(wave.rows, lengths, strict=True)):
            ids[place, -length:] = self._batch.tokens[row, :length]
            mask[place, -length:] = 1
        self._num_computed += int(lengths.sum())
        self._num_recomputed += int(np.minimum(self._batch.seen[wave.rows], lengths).sum())
        self._batch.seen[wave.rows] = lengths
        wave.mask = self._tensor(mask)
        positions = self._tensor(np.maximum(mask.cumsum(1) - 1, 0))
        return self._forward(wave, self._tensor(ids), positions)

    def _decode(self, wave: _Wave) -> Tensor:
        """Logits [n, vocabulary] after the last token of each row."""
        assert wave.mask is not None
        lengths = self._batch.length[wave.rows]
        ids = self._batch.tokens[wave.rows, lengths - 1].astype(np.int64)[:, None]
        self._num_computed += len(lengths)
        self._batch.seen[wave.rows] = lengths
        wave.mask = torch.cat([wave.mask, wave.mask.new_ones(len(lengths), 1)], dim=1)
        return self._forward(wave, self._tensor(ids), self._tensor(lengths[:, None] - 1))

    def _forward(self, wave: _Wave, ids: Tensor, positions: Tensor) -> Tensor:
        output = self._model(
            input_ids=ids,
            attention_mask=wave.mask,
            position_ids=positions,
            past_key_values=wave.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        wave.cache = output.past_key_values
        logits: Tensor = output.logits[:, -1]
        return logits

    def _free(self, row: int) -> None:
        """Gives a row and its place in its wave back."""
        self._num_reserved -= self._batch.call(row).max_len
        self._batch.remove(row)
        wave = next(each for each in self._waves if row in each.rows)
        stays = np.flatnonzero(wave.rows != row)
        wave.rows = wave.rows[stays]
        if not len(stays):
            self._waves.remove(wave)
        elif wave.cache is not None and wave.mask is not None:
            kept = self._tensor(stays)
            wave.cache.batch_select_indices(kept)
            wave.mask = wave.mask.index_select(0, kept)

    def _tensor(self, array: Int64Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def stats(self) -> EngineStats:
        """See `SteppedEngine`."""
        used = int(self._batch.length[self._batch.active()].sum())
        return EngineStats(
            policy_version=self.policy_version,
            capacity_tokens=self._config.kv_cache_tokens,
            used_tokens=used,
            num_running=len(self._batch),
            num_waiting=self.num_waiting,
            num_steps=self._num_steps,
            num_read_tokens=self._num_read,
            num_computed_tokens=self._num_computed,
            num_generated_tokens=self._emitter.num_generated,
            num_prompt_tokens=self._num_prompt,
            num_recomputed_tokens=self._num_recomputed,
            num_finished=self._emitter.num_finished,
            num_nonfinite_logprobs=self._emitter.num_nonfinite,
        )


def hf_engine(card: ModelCard, config: InferenceConfig) -> EngineDriver:
    """The reference engine for a model card, not started; raises `EngineRefusalError`."""
    text = card.tokenizer_files.get("tokenizer.json")
    tokenizer = None if text is None else Tokenizer.from_str(text.decode())
    engine = HfEngine(card.config_json, config, tokenizer)
    features = EngineFeatures(
        adapters=True,
        weights_dtypes=WEIGHTS_DTYPES,
        sleep=True,
        engine_args=False,
        stop_strings=tokenizer is not None,
        guided=tokenizer is not None,
        kv_on_update=("recompute",),
        prefix_reuse=False,
        unread_settings=(
            "cpu_matmul", "forward", "step_in", "max_batched_tokens", "kv_block_tokens",
            "gpu_memory_utilization",
        ),
    )  # fmt: skip
    return EngineDriver(engine, in_thread=True, features=features)
