from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine import linear
from tailrace_inference.engine.forward import load_model
from tests.unit.tailrace_inference.harness import config_json


@pytest.fixture(params=["torch", "onednn"])
def library(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "onednn" and not linear.has_onednn_linear():
        pytest.skip("this build of torch has no oneDNN linear kernel")
    linear.select_matmul(request.param)
    yield request.param
    linear.select_matmul("auto")


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 64])
def test_products_are_those_of_float64_by_either_library(
    library: str, num_rows: int, has_bias: bool
) -> None:
    torch.manual_seed(0)
    states, weight = torch.randn(num_rows, 160), torch.randn(192, 160)
    residual, bias = torch.randn(num_rows, 192), torch.randn(192) if has_bias else None
    expected = states.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
    kept = linear.as_read(weight)
    assert torch.equal(kept, weight)
    assert kept.is_contiguous() is (library == "onednn")  # torch's reads columns fastest
    product = linear.project(states, kept, bias)
    torch.testing.assert_close(product.double(), expected, rtol=0, atol=2e-4)
    total = linear.project_onto(residual, states, kept, bias)
    torch.testing.assert_close(total.double(), expected + residual.double(), rtol=0, atol=2e-4)


def test_a_large_product_takes_the_selected_library(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    plain, fused = torch.nn.functional.linear, linear._onednn

    def plainly(*args: Any) -> torch.Tensor:
        taken.append("torch")
        return plain(*args)

    def by_onednn(*args: Any) -> torch.Tensor:
        taken.append("onednn")
        return fused(*args)

    monkeypatch.setattr(linear, "linear", plainly)
    if library == "onednn":
        monkeypatch.setattr(linear, "_onednn", by_onednn)
    linear.project(torch.randn(64, 160), torch.randn(192, 160))
    assert taken == [library]


@pytest.mark.parametrize("cpu_matmul", ["torch", "onednn"])
def test_cpu_matmul_selects_the_library_of_the_engine(cpu_matmul: Any) -> None:
    if cpu_matmul == "onednn" and not linear.has_onednn_linear():
        pytest.skip("this build of torch has no oneDNN linear kernel")
    try:
        load_model(config_json(), InferenceConfig(cpu_matmul=cpu_matmul))
        assert (linear._onednn is not None) is (cpu_matmul == "onednn")
    finally:
        linear.select_matmul("auto")
