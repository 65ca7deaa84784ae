"""`TorchEngine`: one step from end to end.

Invariants: all methods but `submit`, `abort`, `abort_all`, `release_prefixes` and `stage` run on the
thread that steps; each call gets exactly one last chunk; a token carries the version whose weights
sampled it; keys and values of an older version are used only with `kv_on_update: keep`, and these
tokens are counted.
"""

import time
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.attention import AttentionStep, Group
from tailrace_inference.engine.cache_size import NoCacheError
from tailrace_inference.engine.decode_graphs import RECORDERS, DecodeGraphs
from tailrace_inference.engine.forward import LoadedModel, load_model
from tailrace_inference.engine.kv_cache import BlockPool, Int64Array, KVCache
from tailrace_inference.engine.kv_residency import KVResidency
from tailrace_inference.engine.planner import MAX_RECOMPUTED_TOKENS, GroupRange, StepPlan, plan_step
from tailrace_inference.engine.stepped import SteppedBase
from tailrace_inference.ports import EngineStats

# Blocks that one attention call gathers: about the cache of a CPU core; large calls on a GPU.
_MAX_GATHERED_BLOCKS = {"cpu": 256, "cuda": 8192}


class TorchEngine(SteppedBase):
    """Continuous batching of one model; see `SteppedEngine` for its threads."""

    def __init__(
        self, model: LoadedModel, config: InferenceConfig, tokenizer: Tokenizer | None = None
    ) -> None:
        super().__init__(model.model, model.device, model.vocab_size, config, tokenizer)
        self._model = model
        self._num_steps = self._num_computed = self._num_recomputed = self._num_stale = 0
        self._num_read = 0
        self._lay_out()

    def _lay_out(self) -> None:
        """Makes cache, rows and queues for the model's forward; there are no calls yet."""
        config, model = self._config, self._model
        self._block_tokens = config.kv_block_tokens
        self._max_gathered_blocks = _MAX_GATHERED_BLOCKS[model.device.type]
        num_blocks = model.cache_tokens // self._block_tokens
        self.capacity_tokens = num_blocks * self._block_tokens
        max_len = min(model.max_len, self.capacity_tokens)
        spare_block = num_blocks + 1  # for the padding of `DecodeGraphs`
        try:
            cache = KVCache(
                model.layers, spare_block + 1, self._block_tokens, model.device, model.cache_dtype
            )
        except RuntimeError as error:  # from torch
            raise NoCacheError(self.capacity_tokens, str(error)) from error
        self._cache = cache
        self._graphs: DecodeGraphs | None = None
        if model.choice.name == "llama" and model.device.type in RECORDERS:
            output_matrix: Tensor = model.model.get_output_embeddings().weight  # type: ignore[operator]
            self._graphs = DecodeGraphs(
                model.forward, cache, spare_block, config.max_running, output_matrix
            )
        self._make_rows(max_len, -(-max_len // self._block_tokens), self._free)
        self._residency = KVResidency(
            self._batch,
            cache,
            BlockPool(num_blocks + 1),
            self._intake.waiting,
            config.prefix_cache,
            self._flush_row,
        )

    @classmethod
    def from_config_json(
        cls,
        config_json: bytes,
        config: InferenceConfig,
        tokenizer: Tokenizer | None = None,
        *,
        merges_adapters: bool = False,
    ) -> "TorchEngine":
        """Builds the architecture of a `config.json`; `stage` and `apply` bring the weights."""
        model = load_model(config_json, config, merges_adapters=merges_adapters)
        return cls(model, config, tokenizer)

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`."""
        return self._model.device.type

    @property
    def forward_name(self) -> str:
        """Name of the chosen forward."""
        return self._model.choice.name

    @property
    def is_bounded(self) -> bool:
        """True if sequences are bounded below a length at which the model changes."""
        return self._model.choice.max_tokens is not None

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(parameter.numel() for parameter in self._model.model.parameters())

    def _on_new_weights(self, policy_version: int) -> None:
        """The first weights decide whether the forward is right for them."""
        if self.policy_version < 0 and self._model.recheck():
            self._lay_out()
        self._model.forward.refresh()
        if self._config.kv_on_update == "recompute":
            self._residency.forget_computed(policy_version)

    def _forget_computed(self) -> None:
        self._flush(time.perf_counter())
        self._residency.forget_computed(self.policy_version)

    def _cache_tensors(self) -> Iterable[Tensor]:
        return self._cache.arenas

    def sleep(self) -> None:
        """See `SteppedEngine`; weights and cache may wake up elsewhere in memory."""
        if self._graphs is not None:
            self._graphs.forget()
        self._model.forward.refresh()  # one of rows keeps caches of its own
        super().sleep()

    def _release(self, episode_ids: Sequence[str]) -> None:
        self._residency.release(episode_ids)

    def _compute(self, now_s: float) -> None:
        self._residency.admit(self.policy_version, now_s)
        if len(self._batch):
            self._compute_rows(now_s)

    @torch.inference_mode()
    def _compute_rows(self, now_s: float) -> None:
        """Computes the rows within the budget, samples, and sends what is due."""
        batch = self._batch
        device = self._model.device.type
        rows, take = self._residency.schedule(
            self._config.max_batched_tokens, MAX_RECOMPUTED_TOKENS[device]
        )
        plan = plan_step(
            rows, take, batch.computed[rows], self._block_tokens, self._max_gathered_blocks
        )
        done = plan.start + plan.take == batch.length[plan.rows]
        sampled_rows = plan.rows[done]
        logits = self._logits(plan, (plan.first + plan.take - 1)[done])
        self._count(plan)
        batch.computed[plan.rows] += plan.take
        if not len(sampled_rows):
            return
        self._sampler.take(sampled_rows, logits, self.policy_version)
        self._num_stale += int(np.count_nonzero(batch.kv_version[sampled_rows] != self.policy_version))
        self._emitter.flush_due(self.policy_version, now_s)

    def _free(self, row: int) -> None:
        self._residency.finish(row)

    def _flush_row(self, row: int) -> None:
        self._emitter.flush(np.array([row]), self.policy_version, time.perf_counter())

    def _logits(self, plan: StepPlan, last: Int64Array) -> Tensor:
        """Logits [n, vocabulary] of the flat tokens `last` [n]."""
        batch, size = self._batch, self._block_tokens
        ids = batch.tokens[plan.token_rows, plan.positions].astype(np.int64)
        slots = batch.table[plan.token_rows, plan.positions // size] * size + plan.positions % size
        if self._graphs is not None and len(plan.rows) == len(plan.positions):
            num_blocks = max(group.num_blocks for group in plan.groups)
            found = self._graphs.logits(ids, plan.positions, slots, batch.table[plan.rows, :num_blocks])
            if found is not None:
                return found if len(last) == len(ids) else found[self._tensor(last)]
        groups = [self._group(plan, group) for group in plan.groups]
        step = AttentionStep(self._cache, self._tensor(slots), groups)
        return self._model.forward.logits(
            self._tensor(ids), self._tensor(plan.positions), self._tensor(last), step
        )

    def _group(self, plan: StepPlan, group: GroupRange) -> Group:
        """Tensors of one attention group."""
        rows = slice(group.first_row, group.last_row)
        take, first, queries = plan.take[rows], plan.first[rows], group.num_queries
        start, end = int(first[0]), int(first[-1] + take[-1])
        blocks = self._tensor(self._batch.table[plan.rows[rows], : group.num_blocks].ravel())
        if end - start == len(take) * queries:
            positions = self._tensor(plan.positions[start:end].reshape(-1, queries))
            return Group(start, end, len(take), queries, blocks, positions, None, None)
        place = np.minimum(np.arange(queries), take[:, None] - 1)
        padded = first[:, None] + place
        offset = np.arange(len(take)) * queries - (first - start)
        unpad = np.arange(end - start) + np.repeat(offset, take)
        positions = self._tensor(plan.positions[padded])
        pad_index, unpad_index = self._tensor(padded.ravel()), self._tensor(unpad)
        return Group(start, end, len(take), queries, blocks, positions, pad_index, unpad_index)

    def _tensor(self, array: Int64Array) -> Tensor:
        return torch.from_numpy(array).to(self._model.device, non_blocking=True)

    def _count(self, plan: StepPlan) -> None:
        batch, rows = self._batch, plan.rows
        end = plan.start + plan.take
        self._num_steps += 1
        self._num_computed += len(plan.positions)
        self._num_read += int(end.sum())
        self._num_recomputed += int(np.maximum(np.minimum(end, batch.seen[rows]) - plan.start, 0).sum())
        batch.seen[rows] = np.maximum(batch.seen[rows], end)

    def stats(self) -> EngineStats:
        """See `SteppedEngine`."""
        residency, emitter = self._residency, self._emitter
        size = self._block_tokens
        cached = residency.prefixes.num_blocks
        return EngineStats(
            policy_version=self.policy_version,
            capacity_tokens=self.capacity_tokens,
            max_sequence_tokens=self.max_len,
            used_tokens=self.capacity_tokens - (residency.pool.num_free + cached) * size,
            cached_tokens=cached * size,
            num_running=len(self._batch),
            num_waiting=self.num_waiting,
            num_steps=self._num_steps,
            num_read_tokens=self._num_read,
            num_computed_tokens=self._num_computed,
            num_generated_tokens=emitter.num_generated,
            num_prompt_tokens=residency.num_prompt_tokens,
            num_prefix_hit_tokens=residency.num_hit_tokens,
            num_recomputed_tokens=self._num_recomputed,
            num_stale_kv_tokens=self._num_stale,
            num_preemptions=residency.num_preemptions,
            num_preempted_tokens=residency.num_preempted_tokens,
            num_finished=emitter.num_finished,
            num_nonfinite_logprobs=emitter.num_nonfinite,
        )
