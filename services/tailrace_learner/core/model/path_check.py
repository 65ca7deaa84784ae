"""Choice of a model's way at load: the fastest one that computes what the plain model computes.

Each way gets the same three rows: a short one, one past every special length, and one that begins
like it. Their hidden states, and the gradients of their embeddings, must be those of single rows in the
plain transformers model in evaluation mode. The model's special lengths are made short for the check,
and it is made twice: with the weights as they are, and with small and constant ones moved
(`model_probe`). Nothing of the model's size is copied.

Differences are relative to the norm of a state, in float32. Reordered float32 sums differ by 1e-6 to
1e-5, over all layers; a part that a wrong way leaves out or lets in differs by 1e-3 and more.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.model_probe import (
    SHORT,
    forget_lengths,
    ordinary_tokens,
    shortened,
    special_lengths,
    stirred,
    trial_length,
)
from tailrace_learner.core.batch.packing import pack
from tailrace_learner.core.batch.rows import TrainingRow, demonstration_row
from tailrace_learner.core.model.forward_path import (
    PACKED,
    ForwardPath,
    UntrainableModelError,
    decoder_of,
    hidden_states,
    set_evaluation,
    set_path,
    use_attention,
)
from tailrace_learner.core.model.head_check import head_kind

_TOLERANCE = 2e-4  # of the worst token, float32
_GRADIENT_TOLERANCE = 2e-3  # of the worst token: sums of both signs cancel
# Of the plain model's states, which later tokens change by more if it reads them: in rows of two
# lengths kernels may round products differently (TF32).
_CAUSAL_TOLERANCE, _CAUSAL_HALF_TOLERANCE = 1e-3, 0.01
_HALF_TOLERANCE = 0.05  # mean over tokens, of attention that computes in half precision only
_LONG_OF_SHORT = 44  # for the CPU's kernels of short rows
_LEAST_LONG = 12
_NUM_DRAWS = 6  # of tokens: near ties of routers and of rounding spoil some, on each processor others


def no_kernels(model: Any) -> int:
    """Leaves a model as it is, for devices without kernels of ours."""
    return 0


@dataclass(frozen=True, slots=True)
class Wish:
    """Ways that the configuration allows, and the kernels of this device."""

    attention: str = PACKED
    packs: bool = True
    rows: bool = True
    shares_prefixes: bool = True
    autocast: bool = False  # passes compute in bfloat16
    speed_up: Callable[[Any], int] = no_kernels  # puts fast kernels in; returns their number
    slow_down: Callable[[Any], object] = no_kernels  # takes them out

    @property
    def is_half(self) -> bool:
        """True for attention that computes in half precision only."""
        return self.attention.startswith("flash_attention")


class _Trial(NamedTuple):
    """Rows and the state of the model in which they are computed."""

    num_tokens: int  # of the longest row
    is_short: bool  # special lengths are
    is_stirred: bool
    seed: int


class _Found(NamedTuple):
    """Results for the rows of a trial."""

    states: list[Tensor]  # [m, H] by row
    gradients: Tensor  # [U, H] of the embeddings of each token id


def choose_path(model: Any, wish: Wish) -> ForwardPath:
    """Chooses and sets the model's way; raises `UntrainableModelError`."""
    set_evaluation(model)
    check = _Check(model, wish)
    path = check.path()
    set_path(model, path)
    if wish.autocast:
        check.try_bfloat16(path)
    return path


class _Check:
    """Tries the ways of one model. `_reason`: that of the first one that failed."""

    def __init__(self, model: Any, wish: Wish) -> None:
        self._model = model
        self._wish = wish
        self._reason = ""
        self._plain: dict[_Trial, _Found] = {}
        least = min(special_lengths(model).values(), default=0)
        self._bound = least - 1 if least else None  # rows up to it reach no special length
        use_attention(model, "eager")
        longest = trial_length(model)
        self._head_kind = head_kind(model, self._token_ids[: min(6, longest)])
        lengths = longest, min(longest, _LONG_OF_SHORT)
        self._anywhere = self._trials(*lengths, is_short=bool(least))
        long = min(longest, self._bound or 0)
        self._below = self._trials(long, is_short=False) if long >= _LEAST_LONG else []
        if self._below:  # rows below a length, together beyond it
            self._below += self._trials(min(long, SHORT - 1), is_short=True)

    def path(self) -> ForwardPath:
        """Fastest way that is right."""
        if not all(map(self._is_causal, self._below or self._anywhere)):
            raise self._untrainable("its states depend on later tokens: it is no causal model")
        single = self._single_attention()
        if found := self._packed(single):
            return found
        if single and self._wish.rows:
            return self._way(single, max_packed_tokens=0, shares_prefixes=False)
        raise self._untrainable(self._reason)

    def try_bfloat16(self, path: ForwardPath) -> None:
        """Raises `UntrainableModelError` if a pass fails in bfloat16."""
        trial = (self._anywhere or self._below)[0]
        rows = self._rows(trial)
        try:
            with foreign_code("a pass in bfloat16"), torch.autocast(self._device.type, torch.bfloat16):
                self._result(rows, partial(self._split, rows, path))
        except ForeignCodeError as error:
            reason = f"{error} (learner.model_args.dtype float32 is possible)"
            raise self._untrainable(reason) from error

    def _untrainable(self, reason: str) -> UntrainableModelError:
        return UntrainableModelError(str(self._model.config.model_type), reason)

    def _way(self, single: str, **given: Any) -> ForwardPath:
        return ForwardPath(
            attention=self._wish.attention,
            single_attention=single,
            head=self._head_kind,
            reason=self._reason,
            **given,
        )

    def _packed(self, single: str) -> ForwardPath | None:
        """Fastest packed way that is right: with the device's kernels, or without them."""
        wish, found = self._wish, None
        use_attention(self._model, wish.attention)  # kernels look for it
        if wish.packs and wish.speed_up(self._model):
            found = self._first_right(single)
        if found is None:
            wish.slow_down(self._model)
            found = self._first_right(single) if wish.packs else None
        return found

    def _first_right(self, single: str) -> ForwardPath | None:
        """Fastest packed way that is right with the layers as they are now."""
        bounds: list[tuple[int | None, list[_Trial]]] = []
        if self._anywhere:
            bounds.append((None, self._anywhere))
        if self._below and single and self._wish.rows:
            bounds.append((self._bound, self._below))
        for bound, trials in bounds:
            for shares in (True, False) if self._wish.shares_prefixes else (False,):
                path = self._way(single, max_packed_tokens=bound, shares_prefixes=shares)
                if self._agrees(path, trials):
                    return path
        return None

    def _single_attention(self) -> str:
        """Attention of rows by themselves: torch's fused one if it is right; empty if none is."""
        trials = self._anywhere or self._below
        for name in ("sdpa", "eager"):
            path = ForwardPath(
                attention=name, single_attention=name, max_packed_tokens=0, shares_prefixes=False
            )
            if trials and self._agrees(path, trials, is_told=False):
                return name
        return ""

    def _trials(self, *lengths: int, is_short: bool) -> list[_Trial]:
        """Trials that the plain model computes; none if it does not."""
        is_cpu = self._device.type == "cpu"
        found = [
            _Trial(length, is_short, is_stirred, seed=0)
            for length in (lengths if is_cpu else lengths[:1])
            for is_stirred in (False, True)
        ]
        try:
            with foreign_code("the plain model"):
                for trial in found:
                    self._plain_result(trial)
        except ForeignCodeError as error:
            self._reason = self._reason or str(error)
            return []
        return found

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._model.get_input_embeddings().weight.device
        return device

    def _agrees(self, path: ForwardPath, trials: Sequence[_Trial], *, is_told: bool = True) -> bool:
        """Tells whether a way gives what the plain model gives."""
        try:
            with foreign_code(path.name):
                reason = next(filter(None, (self._difference(path, trial) for trial in trials)), "")
        except ForeignCodeError as error:
            reason = str(error)
        if reason and is_told and not self._reason:
            self._reason = f"{path.name}: {reason}"
        return not reason

    def _difference(self, path: ForwardPath, trial: _Trial) -> str:
        """Difference of a way from the plain model; empty if there is none in some draw of tokens."""
        found = ""
        for seed in range(_NUM_DRAWS):
            drawn = trial._replace(seed=seed)
            with self._state(drawn):
                set_path(self._model, path)
                if not use_attention(self._model, path.attention):
                    return f"its attention cannot be replaced by {path.attention!r}"
                rows = self._rows(drawn)
                result = self._result(rows, partial(self._split, rows, path))
            found = _difference(result, self._plain_result(drawn), is_half=self._wish.is_half)
            if not found:
                break
        return found

    def _plain_result(self, trial: _Trial) -> _Found:
        """Results of the model as it is, row by row."""
        if trial not in self._plain:
            with self._state(trial):
                use_attention(self._model, "eager")
                self._model.eval()
                rows = self._rows(trial)
                self._plain[trial] = self._result(rows, lambda: [self._alone(row) for row in rows])
            set_evaluation(self._model)
        return self._plain[trial]

    @contextmanager
    def _state(self, trial: _Trial) -> Iterator[None]:
        with ExitStack() as stack:
            if trial.is_short:
                stack.enter_context(shortened(self._model))
            if trial.is_stirred:
                stack.enter_context(stirred(self._model))
            stack.enter_context(
                torch.autocast(self._device.type, torch.bfloat16, enabled=self._wish.is_half)
            )
            yield

    def _split(self, rows: Sequence[TrainingRow], path: ForwardPath) -> list[Tensor]:
        """States [m, H] of rows by one batch, in the order of `rows`: shortest first."""
        batch = pack(rows, self._device, share_prefixes=path.shares_prefixes)
        states = hidden_states(self._model, batch)
        return list(torch.split(states, np.diff(batch.target_offsets).tolist()))

    def _alone(self, row: TrainingRow) -> Tensor:
        """States [m, H] inside of the whole model."""
        forget_lengths(self._model)
        caught: list[Any] = []
        hook = decoder_of(self._model).register_forward_hook(
            lambda module, args, output: caught.append(output)
        )
        ids = torch.from_numpy(row.token_ids).to(self._device).unsqueeze(0)
        try:
            self._model(input_ids=ids, use_cache=False)
        finally:
            hook.remove()
        states: Tensor = caught[0].last_hidden_state
        return states[0, row.targets - 1]

    def _is_causal(self, trial: _Trial) -> bool:
        """Tells whether two rows that begin alike have the same states there, in some draw of tokens.

        A new model has small weights, by which later tokens change earlier states little.
        """
        num_shared = _num_shared(trial)
        for seed in range(_NUM_DRAWS):
            _, twin, long = self._plain_result(trial._replace(seed=seed)).states
            errors = _errors(twin[:num_shared], long[:num_shared])
            is_half = self._wish.is_half
            error = float(errors.mean() if is_half else errors.max())
            if error <= (_CAUSAL_HALF_TOLERANCE if is_half else _CAUSAL_TOLERANCE):
                return True
        return False

    def _rows(self, trial: _Trial) -> list[TrainingRow]:
        """A short row, one that begins like the last, and the last, of `num_tokens`: shortest first."""
        random = np.random.default_rng(trial.seed)
        long = random.choice(self._token_ids, trial.num_tokens + 1)
        twin = np.concatenate((long[: _num_shared(trial)], random.choice(self._token_ids, 4)))
        all_rows = (random.choice(self._token_ids, 6), twin, long)
        ends = [ids[: trial.num_tokens + 1] for ids in all_rows]
        rows = [demonstration_row("", ids, np.ones(len(ids), np.uint8)) for ids in ends]
        return [row for row in rows if row is not None]

    @cached_property
    def _token_ids(self) -> NDArray[np.int64]:
        """Tokens of which rows are drawn."""
        size = int(self._model.get_input_embeddings().weight.shape[0])
        return np.array(ordinary_tokens(self._model.config, size), np.int64)

    def _result(self, rows: Sequence[TrainingRow], compute: Callable[[], list[Tensor]]) -> _Found:
        """States of rows, and gradients of a fixed sum of them by token."""
        given: list[tuple[Tensor, Tensor]] = []

        def watch(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
            leaf = output.detach().requires_grad_()
            given.append((args[0].flatten(), leaf))
            return leaf.clone()

        hook = self._model.get_input_embeddings().register_forward_hook(watch)
        try:
            states = [found.float() for found in compute()]
        finally:
            hook.remove()
        generator = torch.Generator().manual_seed(1)
        factors = [torch.randn(each.shape, generator=generator).to(each.device) for each in states]
        total = torch.stack([(a * b).sum() for a, b in zip(states, factors, strict=True)]).sum()
        ids = torch.from_numpy(np.unique(np.concatenate([row.token_ids for row in rows])))
        sums = torch.zeros((len(ids), given[0][1].shape[-1]))
        grads = torch.autograd.grad(total, [leaf for _, leaf in given])
        for (tokens, _), grad in zip(given, grads, strict=True):
            places = torch.searchsorted(ids, tokens.cpu())
            sums.index_add_(0, places, grad.flatten(0, -2).float().cpu())
        return _Found([each.detach().cpu() for each in states], sums)


def _num_shared(trial: _Trial) -> int:
    """Tokens that the two longer rows of a trial have in common."""
    return max(trial.num_tokens // 2, min(8, trial.num_tokens - 4))


def _errors(found: Tensor, plain: Tensor) -> Tensor:
    """Difference of states [m, H], relative to the norm of each, [m]."""
    error: Tensor = (found - plain).norm(dim=-1) / plain.norm(dim=-1).clamp_min(1e-12)
    return error


def _difference(found: _Found, plain: _Found, *, is_half: bool) -> str:
    """Difference of results beyond the tolerance, in words; empty if there is none."""
    pairs = zip(found.states, plain.states, strict=True)
    errors = torch.cat([_errors(*pair) for pair in pairs])
    scale = plain.gradients.norm(dim=-1).mean().clamp_min(1e-12)
    of_gradients = (found.gradients - plain.gradients).norm(dim=-1) / scale
    for name, values, tolerance in (
        ("hidden states", errors, _TOLERANCE),
        ("gradients", of_gradients, _GRADIENT_TOLERANCE),
    ):
        error = float(values.mean() if is_half else values.max())
        if not error <= (_HALF_TOLERANCE if is_half else tolerance):
            return f"{name} differ from those of single rows by {error:.2g}"
    return ""
