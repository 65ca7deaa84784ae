"""Low-rank adapters by `peft`: adds them to a model, separates them from its weights, merges both.

The model's own weights keep their Hugging Face names outside of this process. Adapters are published as
`<layer>.lora_A.weight` [r, in] and `<layer>.lora_B.weight` [out, r], the latter with the scale in it:
W + B A is the layer's weight. A checkpoint holds merged weights, which load anywhere, and beside them
the adapters in `lora.safetensors`; a learner that resumes subtracts these from those in float64.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from tailrace.config import ConfigError
from tailrace.import_path import load_extra
from tailrace_learner.config_execution import LoraArgs
from tailrace_learner.core.model.forward_path import path_of, set_path, use_attention

LORA_FILE = "lora.safetensors"
_ADAPTER = "default"  # peft's name for a single adapter

Whole = Callable[[Tensor], Tensor]  # returns a weight in full


class AdaptedLayer(NamedTuple):
    """A linear layer with an adapter."""

    name: str  # in the Hugging Face model
    module: Any  # peft.tuners.lora.Linear

    @property
    def down(self) -> nn.Parameter:
        """A, [r, in]."""
        parameter: nn.Parameter = self.module.lora_A[_ADAPTER].weight
        return parameter

    @property
    def up(self) -> nn.Parameter:
        """B without its scale, [out, r]."""
        parameter: nn.Parameter = self.module.lora_B[_ADAPTER].weight
        return parameter

    @property
    def scale(self) -> float:
        """alpha / r."""
        return float(self.module.scaling[_ADAPTER])

    def as_weight(self, product: Tensor) -> Tensor:
        """Product B A in the order of the layer's weight, which some models keep as [in, out]."""
        return product.t() if self.module.fan_in_fan_out else product


def add_adapters(model: Any, args: LoraArgs, seed: int) -> None:
    """Add adapters with zero effect to the named layers; afterwards only adapters have gradients.

    `ConfigError` when `peft` is not installed or no layer has such a name.
    """
    peft = load_extra("peft", "lora", "learner.lora")
    config = peft.LoraConfig(
        r=args.r,
        lora_alpha=args.alpha,
        lora_dropout=0.0,
        target_modules=[f"0.{name}" for name in _target_names(model, args.target_modules)],
    )
    torch.manual_seed(seed)
    holder = nn.ModuleList([model])  # peft takes a model's names for other layers, by its type
    try:
        peft.inject_adapter_in_model(config, holder, adapter_name=_ADAPTER)
    except ValueError as error:
        raise ConfigError(f"learner.lora.target_modules: {error}") from error


def _target_names(model: Any, wanted: tuple[str, ...]) -> list[str]:
    """Full names of the linear layers that get adapters; `ConfigError` if there are none."""
    linear = _linear_layers(model)
    takes_all = wanted == ("all-linear",)
    found = [name for name in linear if takes_all or name.rpartition(".")[2] in wanted]
    unfit = _unfit(model, found)
    if unfit and not takes_all:
        name, reason = next(iter(unfit.items()))
        raise ConfigError(
            f"learner.lora.target_modules: {model.config.model_type} {reason}: leave "
            f"{name.rpartition('.')[2]} out"
        )
    found = [name for name in found if name not in unfit]
    if not found:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
        raise ConfigError(
            f"learner.lora.target_modules: {model.config.model_type} has no linear layers named "
            f"{', '.join(wanted)}; its linear layers are: {known}"
        )
    return found


def _unfit(model: Any, names: list[str]) -> dict[str, str]:
    """Layers on which an adapter would be wrong, with the reason."""
    uncalled = {
        name: f"reads the weight of {name} itself, so that an adapter has no effect"
        for name in _uncalled(model, names)
    }
    shared = {
        name: f"has one weight for {name} and other layers, which cannot have adapters of their own"
        for name in _shared(model, names)
    }
    return uncalled | shared


def _linear_layers(model: Any) -> list[str]:
    """Matrices with a layer of their own, except the output matrix; experts of one tensor are none.

    Nor are layers that make more of their product, as some routers do: it is no place for an addend.
    """
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if module is not head and isinstance(module, nn.Linear | Conv1D) and _is_product(module)
    ]


@torch.no_grad()
def _is_product(module: nn.Linear | Conv1D) -> bool:
    """Tells whether a layer's output is its product alone: by its forward, or by a trial."""
    kind = getattr(type(module), "replaces", type(module))
    if kind.forward in (nn.Linear.forward, Conv1D.forward):
        return True
    weight = module.weight
    sample = torch.randn((1, 3, weight.shape[-1]), generator=torch.Generator().manual_seed(0)).to(
        weight
    )
    try:
        found = module(sample)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # it takes other input
        return False
    expected = functional.linear(sample, weight, module.bias)
    return (
        isinstance(found, Tensor)
        and found.shape == expected.shape
        and found.allclose(expected, 1e-4, 1e-4)
    )


@torch.no_grad()
def _uncalled(model: Any, names: list[str]) -> list[str]:
    """Layers that no pass calls: the model reads their weights. Experts wait for tokens."""
    called: set[str] = set()
    hooks = [
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.add(name))
        for name in names
    ]
    weight, path = model.get_input_embeddings().weight, path_of(model)
    use_attention(model, "eager")
    try:
        ids = torch.arange(min(16, len(weight)), device=weight.device).unsqueeze(0)
        model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
        set_path(model, path)
    return [name for name in names if name not in called and ".experts." not in name]


def _shared(model: Any, names: list[str]) -> list[str]:
    """Layers whose weight another layer has too: no sum with an adapter is right for both."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]
    holders = Counter(map(id, weights))
    return [name for name in names if holders[id(model.get_submodule(name).weight)] > 1]


def adapted_layers(model: nn.Module) -> list[AdaptedLayer]:
    """Layers with an adapter; empty for a model without adapters."""
    named = model.named_modules()
    return [AdaptedLayer(name, module) for name, module in named if hasattr(module, "lora_A")]


def plain_name(name: str) -> str:
    """Returns a weight's name in the Hugging Face model."""
    return name.replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    """True if a parameter of the model belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def published_adapters(model: nn.Module, whole: Whole) -> Iterator[tuple[str, Tensor]]:
    """Yield all adapters in the form for engines (collective)."""
    for layer in adapted_layers(model):
        down, up = whole(layer.down), whole(layer.up) * layer.scale
        if layer.module.fan_in_fan_out:
            down, up = up.t(), down.t()
        yield f"{layer.name}.lora_A.weight", down
        yield f"{layer.name}.lora_B.weight", up


def merged(model: nn.Module, whole: Whole) -> Iterator[tuple[str, Tensor]]:
    """Yield name and W + B A of each adapted layer's weight, one at a time (collective)."""
    for layer in adapted_layers(model):
        product = layer.as_weight(whole(layer.up) @ whole(layer.down))
        yield f"{layer.name}.weight", whole(layer.module.base_layer.weight) + layer.scale * product


def kept_adapters(
    model: nn.Module, whole: Whole, *, keeps: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield host copies for `restore_adapters`, if this rank `keeps` them (collective)."""
    for layer in adapted_layers(model):
        for part, parameter in (("lora_A", layer.down), ("lora_B", layer.up)):
            tensor = whole(parameter)
            if keeps:
                yield f"{layer.name}.{part}.weight", tensor.to("cpu", copy=True).contiguous()


@torch.no_grad()
def restore_adapters(model: nn.Module, folder: Path) -> None:
    """Load a checkpoint's adapters and subtract them from its merged weights; before `spread`.

    `ConfigError` if it has none or others.
    """
    try:
        kept = load_file(folder / LORA_FILE)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"resume_from_checkpoint: {folder} has no adapters ({error}): it was saved by a run "
            "without learner.lora; begin a new run with pretrain: that folder"
        ) from error
    layers = adapted_layers(model)
    shapes = {f"{layer.name}.lora_A.weight": layer.down.shape for layer in layers}
    shapes |= {f"{layer.name}.lora_B.weight": layer.up.shape for layer in layers}
    if shapes != {name: tensor.shape for name, tensor in kept.items()}:
        raise ConfigError(
            f"resume_from_checkpoint: {folder} has other adapters: give learner.lora as it was"
        )
    for layer in layers:
        layer.down.copy_(kept[f"{layer.name}.lora_A.weight"])
        layer.up.copy_(kept[f"{layer.name}.lora_B.weight"])
        weight = layer.module.base_layer.weight
        product = layer.scale * (layer.up.double() @ layer.down.double())
        weight.copy_(weight.double() - layer.as_weight(product))
