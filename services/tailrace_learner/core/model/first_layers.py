"""First layers of a model on a device for a while: a small model with every kind of layer, for checks.

A model that will be cut over ranks lies on the host as a whole, and no device may hold it. Layers of
one kind compute alike: they have the same classes, shapes and settings, and their configuration says
the same of them. Layers keep their places, so that only the end of the model is left out.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from tailrace.model_probe import free_bytes
from tailrace_learner.core.model.forward_path import decoder_of

_LEAST = 2  # layers, so that one reads what another wrote
_PLACE = re.compile(r"^layer_(idx|id|index|number)$")  # settings that tell layers of one kind apart
_SHARE = 0.8  # of the device's free memory that the weights may take


@contextmanager
def first_layers_on(model: Any, device: torch.device) -> Iterator[int]:
    """Puts the first layers and all that is no layer on the device; then all is as it was.

    They stay on the host if the device has no room for them. Yields their number; 0: it is unknown,
    and all layers take part.
    """
    with ExitStack() as stack:
        num_layers = stack.enter_context(_first_layers(decoder_of(model)))
        tensors = (*model.parameters(), *model.buffers())
        if sum(each.nbytes for each in tensors) <= _SHARE * free_bytes(device):
            stack.enter_context(_moved(model, device))
        yield num_layers


@contextmanager
def _first_layers(decoder: Any) -> Iterator[int]:
    config = decoder.config.get_text_config()
    count = int(getattr(config, "num_hidden_layers", 0) or 0)
    found = {
        name: child
        for name, child in decoder.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    }
    if len(found) != 1:
        yield 0
        return
    ((name, layers),) = found.items()
    kinds = [_kind(layer, config, place, count) for place, layer in enumerate(layers)]
    num_layers = max(_LEAST, *(kinds.index(kind) + 1 for kind in kinds))
    setattr(decoder, name, layers[:num_layers])
    try:
        yield min(num_layers, count)
    finally:
        setattr(decoder, name, layers)


def _kind(layer: nn.Module, config: Any, place: int, count: int) -> list[object]:
    """Classes, settings and shapes of a layer, and what lists of the configuration say of it."""
    said = [
        (key, repr(value[place]))
        for key, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == count
    ]
    return [said, *((name, type(part), *_settings(part)) for name, part in layer.named_modules())]


def _settings(module: nn.Module) -> Iterator[object]:
    for key, value in vars(module).items():
        if isinstance(value, bool | int | float | str | None) and not _PLACE.match(key):
            yield key, value
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        yield name, None if tensor is None else (tensor.shape, tensor.dtype)


@contextmanager
def _moved(model: Any, device: torch.device) -> Iterator[None]:
    """Moves a model; its tensors on the host wait, and come back without a copy."""
    kept = [(each, dict(each._parameters), dict(each._buffers)) for each in model.modules()]
    values = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        model.to(device)
        yield
    finally:
        for module, parameters, buffers in kept:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        for parameter, data in values:
            parameter.data = data
        if device.type == "cuda":
            torch.cuda.empty_cache()
