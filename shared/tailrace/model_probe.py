"""Conditions under which a faster way to compute a model must equal the model itself.

Lengths at which a model changes (sliding window, attention chunk, end of its first context) are too
long for a check at load, and weights that begin as zeros hide what they multiply. `shortened` makes
the lengths short and `stirred` moves small and constant weights, each in place and for a while: no
large weight is copied. Both ways see the same changed model, so that only the way differs.
"""

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tailrace_protos.weights import CONTEXT_KEYS

SHORT = 16  # tokens of every special length while `shortened`

_SPECIAL = re.compile(
    r"window|chunk_(size|len)|block_size|original_max|seq_len_cached|index_topk(?!_blocks)"
    r"|local_attention|floor_scale|n_floor"
)
_LAYERS = re.compile(r"(layers|pattern)$")  # how many layers, or which, have a window
_BLOCKS = re.compile(r"topk_blocks")  # numbers of blocks, each as long as a special length
_FEW = 2
# Lengths that weights have as a dimension: they cannot be made short.
_FIXED = re.compile(r"compress_rate")
_MOST_FIXED = 512
_ROLES = ("_token_id", "_token_index")  # ends of the names of special tokens
_FIRST_TOKEN, _MOST_TOKENS = 3, 4000  # the first three often have roles that no configuration names
_SMALL_WEIGHT = 1 << 14  # elements; larger weights are stirred only if they are constant


def _configurations(model: nn.Module) -> Iterator[Any]:
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "model_type"):
            for each in (config, *(getattr(config, key, None) for key in config.sub_configs)):
                if each is not None:
                    found[id(each)] = each
    yield from found.values()


def _scopes(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Attributes of all modules and configurations, and the dictionaries among them."""
    pending = [vars(owner) for owner in (*_configurations(model), *model.modules())]
    while pending:
        scope = pending.pop()
        yield scope
        hidden = ("_parameters", "_buffers", "_modules")
        pending += [v for k, v in scope.items() if type(v) is dict and not k.startswith(hidden)]


def _rope_types(model: nn.Module) -> set[str]:
    """Kinds of rotary embedding, of all layers."""
    found: set[str] = set()
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        found |= set(kind.values()) if isinstance(kind, dict) else {kind} if kind else set()
    return found


def _is_special(name: object, value: object, names: frozenset[str]) -> bool:
    if not isinstance(name, str) or type(value) is not int or value <= 1:
        return False
    return name in names or bool(_SPECIAL.search(name) and not _LAYERS.search(name))


def special_lengths(model: nn.Module) -> dict[str, int]:
    """Least lengths at which the model may change, by the names that it keeps them under."""
    found: dict[str, int] = {}
    by_context = frozenset({"max_position_embeddings"} if "dynamic" in _rope_types(model) else ())
    for scope in _scopes(model):
        for name, value in scope.items():
            if _is_special(name, value, by_context):
                found[name] = min(value, found.get(name, value))
    return found


def trial_length(model: nn.Module) -> int:
    """Tokens of a sequence past every special length of a shortened model, within its context."""
    fixed = [
        min(value, _MOST_FIXED)
        for scope in _scopes(model)
        for name, value in scope.items()
        if isinstance(name, str) and type(value) is int and _FIXED.search(name)
    ]
    context = context_tokens(getattr(model, "config", None))
    length = max(5 * SHORT, *(2 * each + SHORT for each in fixed), 0)
    return min(length, context) if context else length


def context_tokens(config: Any) -> int:
    """Tokens that a model of this configuration reads at most; 0 if it does not say."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = (getattr(text, key, None) for key in CONTEXT_KEYS)
    return next((value for value in found if type(value) is int and value > 0), 0)


def ordinary_tokens(config: Any, vocab_size: int) -> list[int]:
    """Token ids without a role of their own (the end of a text, an image's place), of the first 4000.

    A role has one id or several.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    special: set[int] = set()
    for name, value in (*vars(config).items(), *vars(text).items()):
        if name.endswith(_ROLES):
            special.update(value if isinstance(value, list | tuple) else [value])
    known = range(min(vocab_size, _MOST_TOKENS))
    return [token for token in known[_FIRST_TOKEN:] if token not in special] or list(known)


@contextmanager
def shortened(model: nn.Module) -> Iterator[None]:
    """Makes every special length at most `SHORT`; puts all back afterwards."""
    names = frozenset(special_lengths(model))
    changed: list[tuple[dict[str, Any], str, int]] = []
    with _kept_ropes(model):
        for scope in _scopes(model):
            for name, value in list(scope.items()):
                short = _FEW if isinstance(name, str) and _BLOCKS.search(name) else SHORT
                if (name in names or short == _FEW) and type(value) is int and value > short:
                    changed.append((scope, name, value))
                    scope[name] = short
        try:
            yield
        finally:
            for scope, name, value in changed:
                scope[name] = value


@contextmanager
def _kept_ropes(model: nn.Module) -> Iterator[None]:
    """Puts the state of rotary embeddings back, which passes may change."""
    kept = []
    for module in model.modules():
        if hasattr(module, "rope_type"):
            buffers = {
                name: (buffer, None if buffer is None else buffer.clone())
                for name, buffer in module._buffers.items()
            }
            kept.append((module, dict(vars(module)), buffers))
    try:
        yield
    finally:
        for module, attributes, buffers in kept:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            for name, (buffer, values) in buffers.items():
                if buffer is not None and values is not None:
                    buffer.copy_(values)
                module._buffers[name] = buffer


def forget_lengths(model: nn.Module) -> None:
    """Lets rotary embeddings that grow with the rows they saw begin anew."""
    for module in model.modules():
        if not _grows(getattr(module, "rope_type", None)):
            continue
        for name in list(module._buffers):
            if not name.endswith("inv_freq") or name.endswith("original_inv_freq"):
                continue
            prefix = name.removesuffix("inv_freq")
            first = getattr(module, f"{prefix}original_inv_freq")
            if (now := module._buffers[name]) is not None and now is not first:
                module._buffers[name] = first.to(now.device)
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def _grows(kind: Any) -> bool:
    return "dynamic" in (set(kind.values()) if isinstance(kind, dict) else {kind})


@contextmanager
def stirred(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """Moves small and constant weights by random amounts, the same each time; puts them back exactly.

    They are norms, biases, gates, decays and sinks: a new model has zeros or ones there.
    """
    with ExitStack() as stack:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            is_small = parameter.numel() <= _SMALL_WEIGHT and parameter.dim() < 3
            if parameter.numel() and (is_small or _is_constant(parameter)):
                stack.callback(_put_back, parameter, _copy(parameter, is_small))
                with torch.no_grad():
                    _stir(parameter, generator)
        yield


@contextmanager
def widened(model: nn.Module) -> Iterator[bool]:
    """Holds weights of half precision in float32, which is exact; puts their dtypes back afterwards.

    Rounding in half precision hides small differences. Yields False, and changes nothing, if the
    device has no room (`widening_bytes`).
    """
    if widening_bytes(model) > free_bytes(next(model.parameters()).device):
        yield False
        return
    halves = [(each, each.dtype) for each in _halves(model)]
    try:
        for tensor, _ in halves:
            tensor.data = tensor.data.float()
        yield True
    finally:
        for tensor, dtype in halves:
            tensor.data = tensor.data.to(dtype)


def widening_bytes(model: nn.Module) -> int:
    """Bytes that `widened` takes beside the weights, at most: one tensor is there twice at a time."""
    sizes = [each.numel() for each in _halves(model)]
    return 2 * (sum(sizes) + max(sizes, default=0))


def free_bytes(device: torch.device) -> float:
    """Bytes that this process may still take of a GPU; of the host's memory there is no limit."""
    if device.type != "cuda":
        return math.inf
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def _halves(model: nn.Module) -> list[Tensor]:
    tensors = (*model.parameters(), *model.buffers())
    return [each for each in tensors if each.dtype in (torch.bfloat16, torch.float16)]


def _is_constant(parameter: Tensor) -> bool:
    flat = parameter.detach().flatten()
    return bool(flat[0] == flat[-1]) and bool((flat == flat[0]).all())


def _copy(parameter: Tensor, is_small: bool) -> Tensor:
    return parameter.detach().clone() if is_small else parameter.detach().flatten()[0].clone()


def _put_back(parameter: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(values)


def _stir(parameter: Tensor, generator: torch.Generator) -> None:
    """Moves matrices by half of what keeps states of unit size, the others by a third."""
    noise = torch.randn(parameter.shape, generator=generator).to(parameter)
    if parameter.dim() > 1:
        parameter.add_(noise, alpha=0.5 * max(parameter.shape) ** -0.5)
    else:
        parameter.mul_(1.0 + 0.3 * noise.clamp(-2.0, 2.0)).add_(noise, alpha=0.1)
