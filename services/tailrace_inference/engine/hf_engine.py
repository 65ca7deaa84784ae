"""`HfEngine`: the modules of transformers as they are, a reference for models that take padded batches.

Calls that join together form a wave: one left-padded batch with a cache of its own, which shrinks as
calls end and goes when the last one has. A step gives each running call one token. A model that
computes something else in such a batch is refused (`padded`).

Invariants: room for the longest possible sequence of a call is reserved before it joins, so none is
preempted; a weight update drops all caches, and waves compute them again with the new weights.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tailrace.log import get_logger
from tailrace.model_probe import widened
from tailrace_inference.config import WEIGHTS_DTYPES, InferenceConfig
from tailrace_inference.engine.driver import EngineDriver
from tailrace_inference.engine.forward import build_model, max_sequence
from tailrace_inference.engine.kv_cache import Int64Array
from tailrace_inference.engine.padded import PaddedCache, check_padded
from tailrace_inference.engine.stepped import SteppedBase
from tailrace_inference.ports import EngineFeatures, EngineStats
from tailrace_protos.weights import ModelCard

_NO_BLOCKS: Int64Array = np.empty(0, np.int64)

log = get_logger(__name__)


class _Wave:
    """Rows that compute together; `cache` holds all tokens but the last of each, or is None."""

    def __init__(self, rows: Int64Array) -> None:
        self.rows = rows
        self.cache: PaddedCache | None = None


class HfEngine(SteppedBase):
    """See `SteppedEngine`."""

    def __init__(
        self, config_json: bytes, config: InferenceConfig, tokenizer: Tokenizer | None = None
    ) -> None:
        self._model = model = build_model(config_json, config)
        vocab_size = int(model.config.get_text_config().vocab_size)
        super().__init__(model, next(model.parameters()).device, vocab_size, config, tokenizer)
        with widened(model) as has_room:  # rounding hides differences
            if not has_room:
                log.warning("forward not checked in float32", reason="the device has no room")
            check_padded(model, is_stirred=True)
        max_len = max_sequence(config, model.config, config.kv_cache_tokens)
        self._make_rows(max_len, 0, self._free)
        self._waves: list[_Wave] = []
        self._num_reserved = 0
        self._num_steps = self._num_prompt = self._num_computed = self._num_recomputed = 0
        self._num_read = 0

    def _on_new_weights(self, policy_version: int) -> None:
        if self.policy_version < 0:
            check_padded(self._model, is_stirred=False)
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
        logits = self._prefill(wave) if wave.cache is None else self._decode(wave, wave.cache)
        self._sampler.take(wave.rows, logits, self.policy_version)

    def _prefill(self, wave: _Wave) -> Tensor:
        """Logits [n, vocabulary] after all tokens of the rows; fills the wave's cache."""
        lengths = self._batch.length[wave.rows]
        self._num_computed += int(lengths.sum())
        self._num_recomputed += int(np.minimum(self._batch.seen[wave.rows], lengths).sum())
        self._batch.seen[wave.rows] = lengths
        wave.cache = PaddedCache(self._model, self._device)
        rows = zip(wave.rows, lengths, strict=True)
        return wave.cache.prefill([self._batch.tokens[row, :length] for row, length in rows])

    def _decode(self, wave: _Wave, cache: PaddedCache) -> Tensor:
        """Logits [n, vocabulary] after the last token of each row."""
        lengths = self._batch.length[wave.rows]
        self._num_computed += len(lengths)
        self._batch.seen[wave.rows] = lengths
        tokens = self._batch.tokens[wave.rows, lengths - 1].astype(np.int64)
        return cache.decode(tokens, lengths.astype(np.int64))

    def _free(self, row: int) -> None:
        """Gives a row and its place in its wave back."""
        self._num_reserved -= self._batch.call(row).max_len
        self._batch.remove(row)
        wave = next(each for each in self._waves if row in each.rows)
        stays = np.flatnonzero(wave.rows != row)
        wave.rows = wave.rows[stays]
        if not len(stays):
            self._waves.remove(wave)
        elif wave.cache is not None:
            wave.cache.keep(stays)

    def stats(self) -> EngineStats:
        """See `SteppedEngine`."""
        return EngineStats(
            policy_version=self.policy_version,
            capacity_tokens=self._config.kv_cache_tokens,
            max_sequence_tokens=self.max_len,
            used_tokens=self._batch.num_tokens,
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
