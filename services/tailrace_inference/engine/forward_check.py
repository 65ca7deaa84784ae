"""Choice of the forward: the fastest one whose logits are those of the plain model.

Two sequences, a short one and one past every special length, are computed in pieces over the cache,
side by side in the same steps, and compared with the plain model on each sequence alone. The model's
special lengths are made short for the check (`model_probe`). Random weights are stirred, and checked in
float32 too: rounding in half precision is as large as what a wrong forward changes. The first real
weights are checked again, and a forward that fails there is replaced by a slower one.

Where a model changes at a length in ways that no forward follows (rotary embeddings that depend on the
longest sequence), sequences are bounded below that length.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.log import get_logger
from tailrace.model_probe import (
    forget_lengths,
    ordinary_tokens,
    shortened,
    special_lengths,
    stirred,
    trial_length,
    widened,
)
from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.attention import (
    ATTENTION_NAME,
    STEP_KWARG,
    AttentionStep,
    Group,
    ShapeProbe,
    UnsupportedModelError,
)
from tailrace_inference.engine.cache_size import DeviceError
from tailrace_inference.engine.kv_cache import KVCache, KVShape
from tailrace_inference.engine.llama_forward import LlamaForward, supports_llama_forward
from tailrace_inference.engine.row_forward import ROW_MODES, TOKEN_LAYERS, RowForward

log = get_logger(__name__)

# Largest difference of a token's logits, relative to the norm of their spread. In half precision the
# mean over tokens: rounding alone may change the choice of a router for some of them.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.06, torch.float16: 0.02}
_BRIEF = 8
_BLOCK_TOKENS = 8
# Of (short, long) sequence: tokens of the first and the last steps. One step between takes the rest.
_FIRST, _LAST = (5, 10), ((1, 29), (1, 1))
_NUM_DRAWS, _NUM_DRAWS_WIDENED = 2, 6
# Of the tokens of a model in half precision, which may have many routers: near ties spoil a few tokens,
# a wrong forward a tenth and more.
_SHARE_RIGHT = 0.95
_WORTHWHILE = 1024  # a fast forward bounded at fewer tokens gives way to a slow one without a bound


class Forward(Protocol):
    """Computes logits of flat tokens."""

    def logits(
        self, ids: Tensor, positions: Tensor, last: Tensor, step: AttentionStep | ShapeProbe
    ) -> Tensor:
        """Logits [n, vocabulary] of the flat tokens `last` [n] among `ids` [T] at `positions` [T]."""

    def refresh(self) -> None:
        """Takes over changed parameters of the modules."""


class GenericForward:
    """The model's own modules, with the attention of this engine."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def logits(
        self, ids: Tensor, positions: Tensor, last: Tensor, step: AttentionStep | ShapeProbe
    ) -> Tensor:
        """See `Forward`."""
        out = self._model(
            input_ids=ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=last,
            **{STEP_KWARG: step},
        )
        logits: Tensor = out.logits[0]
        return logits

    def refresh(self) -> None:
        """See `Forward`; nothing is copied here."""


class Candidate(NamedTuple):
    """A forward, and whether sequences are bounded below the model's least special length."""

    name: str
    attention: str
    is_bounded: bool = False


class Choice(NamedTuple):
    """A forward that agrees."""

    name: str
    forward: Forward
    layers: list[KVShape]
    max_tokens: int | None  # of a sequence

    @property
    def holds_tokens(self) -> bool:
        """True if the cache holds token ids."""
        return self.layers is TOKEN_LAYERS


def _of_rows(*, is_bounded: bool) -> Iterator[Candidate]:
    """Forwards that compute one sequence at a time."""
    for attention in ("sdpa", "eager"):
        for mode in ROW_MODES:
            yield Candidate(mode, attention, is_bounded=is_bounded)


class ForwardChooser:
    """Tries forwards of one model, fastest first; never returns to one that it has left."""

    def __init__(
        self, model: Any, config: InferenceConfig, room: Callable[[list[KVShape]], tuple[int, int]]
    ) -> None:
        self._model = model
        self._config = config
        self._room = room  # tokens of a cache of these layers, and of the longest sequence
        self._is_widened = False
        self._device: torch.device = next(model.parameters()).device
        self._least = min(special_lengths(model).values(), default=0)
        self._longest = trial_length(model)
        self._left = list(self._candidates())
        self._reason = "no forward is allowed"
        self._layers: list[KVShape] = []
        self._made: dict[Candidate, Forward] = {}

    def _candidates(self) -> Iterator[Candidate]:
        """Forwards over paged keys and values before those of one row, whole contexts first."""
        model, mode = self._model, self._config.forward
        is_paged = mode != "rows" and getattr(model, "_supports_attention_backend", False)
        bounded = [Candidate("generic", ATTENTION_NAME, is_bounded=True)] if is_paged else []
        if is_paged:
            if mode == "auto" and supports_llama_forward(model.config):
                yield Candidate("llama", ATTENTION_NAME)
            yield Candidate("generic", ATTENTION_NAME)
        if self._least > (self._config.max_model_len or _WORTHWHILE):
            yield from bounded  # no sequence comes near the bound
        yield from _of_rows(is_bounded=False)
        if self._least > _BRIEF:
            yield from bounded
            yield from _of_rows(is_bounded=True)

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = next(self._model.parameters()).dtype
        return dtype

    @torch.no_grad()
    def choose(self, *, is_stirred: bool) -> Choice:
        """The first forward that agrees; raises `UnsupportedModelError`."""
        if is_stirred and self._dtype != torch.float32:
            self._leave_wrong_ones()
        return self._chosen(self._first_right(is_stirred))

    def _leave_wrong_ones(self) -> None:
        """Leaves forwards up to the first that agrees in float32, if the model computes in it here."""
        with widened(self._model) as has_room:
            if not has_room:
                log.warning("forward not checked in float32", reason="the device has no room")
            elif self._computes_widened():
                self._is_widened = True
                try:
                    self._first_right(is_stirred=True)
                except torch.OutOfMemoryError as error:
                    reason = str(error).partition("\n")[0]
                    log.warning("forward not checked in float32", reason=reason)
                finally:
                    self._is_widened = False
                    self._made.clear()  # they hold the weights in float32, and their room
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the size of the cache is asked of the device

    def _computes_widened(self) -> bool:
        """Tells whether the plain model computes in float32: some kernels do not."""
        self._model.set_attn_implementation("eager")
        try:
            with foreign_code("the plain model"):
                self._plain(drawn_sequences(self._model, self._longest, 0)[0])
        except ForeignCodeError as error:
            log.warning("forward not checked in float32", reason=str(error))
            return False
        return True

    def _first_right(self, is_stirred: bool) -> Candidate:
        """The first forward that agrees as the weights are now; those before it are left."""
        model_type = str(self._model.config.model_type)
        while self._left:
            candidate = self._left[0]
            try:
                with foreign_code(candidate.name):
                    reason = self._disagreement(candidate, is_stirred)
            except ForeignCodeError as error:
                is_full = self._is_widened and isinstance(error.error, torch.OutOfMemoryError)
                if is_full or isinstance(error.error, DeviceError):
                    raise error.error from error
                reason = str(error.error)
            if not reason:
                return candidate
            log.info("forward left", model_type=model_type, forward=candidate.name, reason=reason)
            self._reason = reason
            self._made.pop(candidate, None)
            self._left.pop(0)
        raise UnsupportedModelError(model_type, self._reason)

    def _chosen(self, candidate: Candidate) -> Choice:
        forward, layers = self._forward(candidate)
        forward.refresh()
        bound = self._least - 1 if candidate.is_bounded else None
        log.info("forward chosen", forward=candidate.name, max_tokens=bound)
        return Choice(candidate.name, forward, layers, bound)

    def _forward(self, candidate: Candidate) -> tuple[Forward, list[KVShape]]:
        """A forward and the shapes of its cache; the model has the forward's attention then."""
        model = self._model
        model.set_attn_implementation(candidate.attention)
        if candidate.name in ROW_MODES:
            kept = self._config.kv_cache_tokens
            made = self._made.get(candidate) or RowForward(model, candidate.name, kept)
            self._made[candidate] = made
            return made, TOKEN_LAYERS
        if not self._layers:
            self._layers = _probe_layers(model, drawn_sequences(model, self._longest, 0)[1])
        if candidate not in self._made:
            is_llama = candidate.name == "llama"
            self._made[candidate] = (
                LlamaForward(model, self._num_positions()) if is_llama else GenericForward(model)
            )
        return self._made[candidate], self._layers

    def _num_positions(self) -> int:
        """Positions that a forward is made for: those of its check alone, or of any sequence."""
        room = 0 if self._is_widened else self._room(self._layers)[1]
        return max(room, self._longest)

    def _disagreement(self, candidate: Candidate, is_stirred: bool) -> str:
        """Difference from the plain model, in words; empty if there is none in some draw of tokens."""
        forward, layers = self._forward(candidate)
        found = ""
        for seed in range(_NUM_DRAWS_WIDENED if self._is_widened else _NUM_DRAWS):
            with (
                nullcontext() if candidate.is_bounded else shortened(self._model),
                stirred(self._model) if is_stirred else nullcontext(),
            ):
                ids = drawn_sequences(self._model, self._longest, seed)
                if candidate.is_bounded:
                    ids = [each[: self._least - 1] for each in ids]
                self._model.set_attn_implementation("eager")
                expected = [self._plain(each) for each in ids]
                self._model.set_attn_implementation(candidate.attention)
                forward.refresh()
                errors = self._errors(forward, layers, ids, expected)
            forward.refresh()
            error = self._judged(errors)
            if error <= TOLERANCE[self._dtype]:
                return ""
            found = f"its logits differ from those of the plain model by {error:.2g} of their spread"
        return found

    def _judged(self, errors: Tensor) -> float:
        """One error for those of tokens [T]."""
        if self._dtype != torch.float32:
            return float(errors.mean())
        return float(errors.quantile(_SHARE_RIGHT) if self._is_widened else errors.max())

    def _plain(self, ids: Tensor) -> Tensor:
        forget_lengths(self._model)
        logits: Tensor = self._model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
        return logits.float()

    def _errors(
        self, forward: Forward, layers: list[KVShape], ids: list[Tensor], expected: list[Tensor]
    ) -> Tensor:
        """Relative error of the logits after each token of both sequences."""
        blocks = [-(-len(each) // _BLOCK_TOKENS) for each in ids]
        is_rows = layers is TOKEN_LAYERS
        dtype = torch.float32 if is_rows else self._dtype
        cache = KVCache(layers, 1 + sum(blocks), _BLOCK_TOKENS, self._device, dtype)
        tables = torch.split(torch.arange(1, 1 + sum(blocks), device=self._device), blocks)
        done, errors = [0, 0], []
        for pieces in _pieces(len(ids[1])):
            take = [min(n, len(x) - d) for n, x, d in zip(pieces, ids, done, strict=True)]
            parts = [
                torch.arange(d, d + n, device=self._device) for d, n in zip(done, take, strict=True)
            ]
            step = self._step(cache, tables, parts)
            flat = torch.cat([x[part] for x, part in zip(ids, parts, strict=True)])
            last = torch.arange(len(flat), device=self._device)
            if not len(flat):
                continue
            got = forward.logits(flat, torch.cat(parts), last, step).float()
            wanted = torch.cat([x[part] for x, part in zip(expected, parts, strict=True)])
            spread = (wanted - wanted.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-12)
            errors.append((got - wanted).norm(dim=-1) / spread)
            done = [d + n for d, n in zip(done, take, strict=True)]
        return torch.cat(errors)

    def _step(self, cache: KVCache, tables: tuple[Tensor, ...], parts: list[Tensor]) -> AttentionStep:
        groups, slots, first = [], [], 0
        for table, positions in zip(tables, parts, strict=True):
            if len(positions):
                size, end = len(positions), first + len(positions)
                groups.append(Group(first, end, 1, size, table, positions.unsqueeze(0), None, None))
                slots.append(
                    table[positions // _BLOCK_TOKENS] * _BLOCK_TOKENS + positions % _BLOCK_TOKENS
                )
                first = end
        return AttentionStep(cache, torch.cat(slots) if slots else torch.empty(0), groups)


def _pieces(num_tokens: int) -> Iterator[tuple[int, int]]:
    """Tokens of (short, long) sequence in each step; `num_tokens` has the long one."""
    rest = num_tokens - _FIRST[1] - sum(num for _, num in _LAST)
    yield from (_FIRST, (1, max(rest, 1)), *_LAST)


def drawn_sequences(model: Any, longest: int, seed: int) -> list[Tensor]:
    """Draws a short sequence of ordinary tokens, and one of `longest`."""
    known = ordinary_tokens(model.config, int(model.config.get_text_config().vocab_size))
    random, device = np.random.default_rng(seed), next(model.parameters()).device
    lengths = min(_BRIEF, longest), longest
    return [torch.from_numpy(random.choice(known, length)).to(device) for length in lengths]


def _probe_layers(model: Any, ids: Tensor) -> list[KVShape]:
    """Key and value shapes of all layers; `UnsupportedModelError` if some have no plain attention."""
    probe = ShapeProbe()
    positions = torch.arange(len(ids), device=ids.device)
    GenericForward(model).logits(ids, positions, positions, probe)
    num_layers = int(model.config.get_text_config().num_hidden_layers)
    if sorted(probe.layers) != list(range(num_layers)):
        seen = len(probe.layers)
        raise UnsupportedModelError(
            str(model.config.model_type), f"only {seen} of {num_layers} layers have plain attention"
        )
    return [probe.layers[index] for index in range(num_layers)]
