"""Modules with faster forwards compute what their own do, and give way to what they do not know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tailrace_learner.core.cpu.fast_attention import use_fast_attention
from tailrace_learner.core.cpu.fast_layer import use_cpu_kernels, use_fast_layers
from tailrace_learner.core.model.policy import PolicyModel
from tests.unit.tailrace_learner.factory import CPU, make_model
from tests.unit.tailrace_learner.model.test_shared_prefixes import gradients, mixed_rows
from tests.unit.tailrace_learner.stepping import distance, moved

pytestmark = pytest.mark.usefixtures("cpu_matmul")
FAMILIES = ("qwen3", "qwen2", "llama")
ROUNDING = 5e-6  # of float32, relative to all gradients


def policy_of(model: Any) -> PolicyModel:
    """With norms whose weights are not 1, and biases that are not 0."""
    return moved(PolicyModel(model, CPU, 1.0, 7), seed=3, scale=0.1)


def gradients_of(model: Any) -> torch.Tensor:
    return gradients(policy_of(model), [mixed_rows()], shares=True)


def num_replaced(model: nn.Module) -> int:
    return sum(hasattr(type(module), "replaces") for module in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fast_attention_module_is_used_and_computes_what_the_plain_one_does(family: str) -> None:
    fast = make_model(family)
    use_fast_attention(fast)
    assert num_replaced(fast) == 2
    assert distance(gradients_of(fast), gradients_of(make_model(family))) < ROUNDING


def test_an_attention_that_computes_something_else_keeps_its_own_forward() -> None:
    model = make_model()
    kind = type(model.model.layers[0].self_attn)

    class Halved(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            output, weights = super().forward(hidden_states, *args, **kwargs)
            return 0.5 * output, weights

    model.model.layers[0].self_attn.__class__ = Halved
    eager = make_model("qwen3", "eager")
    for each in (model, eager):
        use_fast_attention(each)
    assert type(model.model.layers[0].self_attn) is Halved
    assert (num_replaced(model), num_replaced(eager)) == (1, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fast_layer_is_used_and_computes_what_the_plain_one_does(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gradients_of(make_model(family))
    fast = make_model(family)
    kind = type(fast.model.layers[0])
    use_fast_attention(fast)
    use_fast_layers(fast)
    assert num_replaced(fast) == 2 + 2
    calls = count_calls(fast, "o_proj")
    monkeypatch.setattr(kind, "forward", None)  # the plain one can no more be called
    assert distance(gradients_of(fast), expected) < ROUNDING
    assert len(calls) == 2  # that part is still the module's own


def count_calls(model: nn.Module, part: str) -> list[str]:
    """Fills with the names of modules that end so and are called from now on."""
    called: list[str] = []
    for name, module in model.named_modules():
        if name.endswith(part):
            module.register_forward_pre_hook(lambda _module, _inputs, name=name: called.append(name))
    return called


@pytest.mark.parametrize("part", ["q_proj", "up_proj", "input_layernorm", "self_attn", "mlp", "act_fn"])
def test_a_hook_on_what_the_fast_layer_would_not_call_is_called(part: str) -> None:
    fast = make_model()
    use_cpu_kernels(fast)
    calls = count_calls(fast, part)
    assert distance(gradients_of(fast), gradients_of(make_model())) < ROUNDING
    assert len(calls) == 2


def test_a_backward_hook_is_called_too() -> None:
    fast = make_model()
    use_cpu_kernels(fast)
    called: list[str] = []
    for layer in fast.model.layers:
        layer.mlp.register_full_backward_hook(lambda *_: called.append("mlp"))
    gradients_of(fast)
    assert called == ["mlp"] * 2


def test_another_linear_module_in_a_layer_is_called() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2.0 * super().forward(input)

    gradient = []
    for is_fast in (False, True):
        model = make_model()
        if is_fast:
            use_cpu_kernels(model)
        model.model.layers[0].mlp.gate_proj.__class__ = Doubled
        gradient.append(gradients_of(model))
    assert distance(gradient[1], gradient[0]) < ROUNDING
    assert distance(gradient[1], gradients_of(make_model())) > 1e-3


def test_a_layer_that_computes_something_else_keeps_its_own_forward() -> None:
    model, without_fast_attention = make_model(), make_model()
    use_fast_attention(model)
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.GELU()
    for each in (model, without_fast_attention):
        use_fast_layers(each)
    assert (num_replaced(model), num_replaced(without_fast_attention)) == (2, 0)


def test_frozen_weights_get_no_gradient_and_the_others_the_right_ones() -> None:
    gradient = []
    for is_fast in (False, True):
        model = make_model()
        if is_fast:
            use_cpu_kernels(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1" in name and "k_proj" not in name)
        gradient.append(gradients(PolicyModel(model, CPU, 1.0, 7), [mixed_rows()], shares=True))
        assert model.model.layers[1].self_attn.k_proj.weight.grad is None
    assert distance(gradient[1], gradient[0]) < ROUNDING
