"""Ways to compute the hidden states of rows: packed into one pass, or each row by itself.

A packed pass computes many rows as one, if possible with shared prefixes once. It is right only for
models whose layers take packed rows. By itself a row goes through the model as transformers wrote it,
with its own attention: slower, and right for every causal model. `path_check` chooses at load; the
choice stays with the model.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tailrace.model_probe import forget_lengths
from tailrace_learner.core.batch.packing import PackedBatch, pack
from tailrace_learner.core.batch.rows import TrainingRow
from tailrace_learner.core.model.logprobs import wide_linear

PACKED = "tailrace_packed"  # name of packed attention


class UntrainableModelError(ValueError):
    """No way computes what the plain model computes. Attributes: `model_type`, `reason`."""

    def __init__(self, model_type: str, reason: str) -> None:
        super().__init__(f"model_type {model_type!r} cannot be trained: {reason}")
        self.model_type = model_type
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ForwardPath:
    """The way of a model's rows; as it stands, the fastest one."""

    attention: str = PACKED  # of packed passes
    single_attention: str = ""  # of rows by themselves; empty: as in packed passes
    max_packed_tokens: int | None = None  # of a row in a packed pass; None: no bound, 0: none is packed
    shares_prefixes: bool = True
    head: Literal["matrix", "own"] = "matrix"  # own: the model's own head makes the logits
    reason: str = ""  # that no faster one was taken

    @property
    def name(self) -> str:
        """Name for logs and reports."""
        if self.max_packed_tokens == 0:
            return "rows"
        return "shared" if self.shares_prefixes else "packed"

    def takes(self, row: TrainingRow) -> bool:
        """True if the row may be in a packed pass."""
        return self.max_packed_tokens is None or len(row.token_ids) <= self.max_packed_tokens


_FASTEST = ForwardPath()


def decoder_of(model: Any) -> Any:
    """The part of a model that makes hidden states; a model without a head is its own."""
    if model.get_output_embeddings() is None:
        return model.base_model
    parts = (model.get_decoder(), model.base_model, getattr(model, "model", None))
    return next((p for p in parts if isinstance(p, PreTrainedModel) and p is not model), model)


def path_of(model: Any) -> ForwardPath:
    """Chosen way of a model; the fastest one for a model that was not checked."""
    found: ForwardPath = getattr(decoder_of(model), "forward_path", _FASTEST)
    return found


def set_path(model: Any, path: ForwardPath) -> None:
    """Keeps the way with the model and sets the attention that its passes begin with."""
    decoder_of(model).forward_path = path
    use_attention(model, path.single_attention if path.max_packed_tokens == 0 else path.attention)


def use_attention(model: Any, name: str) -> bool:
    """Sets the attention of a model; False if its decoder has only its own, which it then keeps."""
    before = decoder_of(model).config._attn_implementation
    if not name or before == name:
        return True
    model.set_attn_implementation(name)
    if decoder_of(model).config._attn_implementation == name:
        return True
    model.set_attn_implementation(before)  # parts of the model may have taken the other
    return False


def set_evaluation(model: Any) -> None:
    """Evaluation mode, in which engines sample: no dropout, no noise in routers.

    Layers that are to be computed again in the backward pass stay in training mode themselves.
    """
    model.eval()
    for module in model.modules():
        if _is_computed_again(module):
            module.training = True


def _is_computed_again(module: Any) -> bool:
    """Tells whether a layer is computed again in the backward pass."""
    return getattr(module, "gradient_checkpointing", False) is True


def _trains(model: Any) -> bool:
    """Tells whether a part of a model is in training mode that should not be; 2 ms of 550 modules."""
    return any(module.training and not _is_computed_again(module) for module in model.modules())


def hidden_states(model: Any, batch: PackedBatch) -> Tensor:
    """Last hidden state [M, H] before each target of the batch, always in evaluation mode."""
    path = path_of(model)
    if _trains(model):
        set_evaluation(model)
    if not all(path.takes(row) for row in batch.rows):
        return torch.cat([_by_itself(model, row, path, batch.input_ids.device) for row in batch.rows])
    if not path.shares_prefixes and batch.input_ids.numel() < sum(len(r.token_ids) for r in batch.rows):
        batch = pack(batch.rows, batch.input_ids.device)
    if path.max_packed_tokens is not None:
        use_attention(model, path.attention)
    packed = batch.packed
    states: Tensor = decoder_of(model)(
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


def _by_itself(model: Any, row: TrainingRow, path: ForwardPath, device: torch.device) -> Tensor:
    """States [m, H] before the row's targets."""
    use_attention(model, path.single_attention)
    forget_lengths(model)
    ids = torch.from_numpy(row.token_ids).to(device, torch.int64)
    states: Tensor = decoder_of(model)(input_ids=ids.unsqueeze(0), use_cache=False).last_hidden_state
    return states[0].index_select(0, torch.from_numpy(row.targets - 1).to(device))


class _Given:
    """Output of a decoder with these hidden states and nothing else."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def own_logits(model: Any, hidden: Tensor, *, bfloat16: bool = False) -> Tensor:
    """Logits [m, V] that the model itself makes of hidden states [m, H], with bias, scale or cap.

    With `bfloat16` the factors of the output matrix's product are rounded to it and their sums are not.
    """
    ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
    given, head = _Given(hidden.unsqueeze(0)), model.get_output_embeddings()
    with ExitStack() as stack:
        stack.enter_context(_with_forward(decoder_of(model), lambda *args, **kwargs: given))
        if bfloat16 and getattr(type(head), "replaces", type(head)) is nn.Linear:
            stack.enter_context(_with_forward(head, partial(wide_linear, head)))
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits[0]


@contextmanager
def _with_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Gives a module another forward for a while."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
