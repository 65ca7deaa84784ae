"""A check on the first layers of a model sees every kind of layer, and leaves the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tailrace_learner.adapters import hf_model
from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_execution import StrategyArgs
from tailrace_learner.core.model import first_layers
from tailrace_learner.core.model.first_layers import first_layers_on
from tailrace_learner.core.model.forward_path import ForwardPath, decoder_of
from tests.models.judge import CPU, moved_model

TWO = LearnerConfig(strategy_args=StrategyArgs(num_ranks=2))


def places(model: Any) -> dict[str, tuple[int, str, int]]:
    """Identity, device and memory of each tensor, by name."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    return {name: (id(each), each.device.type, each.data_ptr()) for name, each in named}


@pytest.mark.parametrize(
    ("name", "num_layers"),
    [
        ("qwen3", 2),  # all alike
        ("smollm3", 2),  # the second does not rotate
        ("gpt_oss", 2),  # one with a window, one without
    ],
)
def test_layers_up_to_the_last_kind_take_part(name: str, num_layers: int) -> None:
    model = moved_model(name)
    count = len(decoder_of(model).layers)
    with first_layers_on(model, CPU) as found:
        assert found == num_layers == len(decoder_of(model).layers) < count
    assert len(decoder_of(model).layers) == count


def test_a_layer_that_is_set_otherwise_is_a_kind_of_its_own() -> None:
    model = moved_model("qwen3")
    model.model.layers[2].self_attn.sliding_window = 7
    with first_layers_on(model, CPU) as found:
        assert found == 3


@pytest.mark.parametrize("name", ["qwen3", "smollm3"])
def test_a_model_comes_back_from_a_device_as_it_was(name: str) -> None:
    model = moved_model(name)
    before = places(model)
    with first_layers_on(model, torch.device("meta")):
        assert {each.device.type for each in model.state_dict().values()} == {"meta"}
    assert places(model) == before


def test_a_device_without_room_leaves_the_model_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    model = moved_model("qwen3")
    with first_layers_on(model, CPU):
        needed = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    for room, place in ((1.2, "cpu"), (1.3, "meta")):
        monkeypatch.setattr(first_layers, "free_bytes", lambda _, room=room: room * needed)
        with first_layers_on(model, torch.device("meta")):
            assert model.device.type == place


def test_the_path_of_a_model_that_waits_to_be_cut_is_chosen_on_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, int, object]] = []

    def choose(model: Any, wish: Any) -> ForwardPath:
        seen.append((model.device.type, len(model.model.layers), wish.speed_up))
        return ForwardPath()

    monkeypatch.setattr(hf_model, "pick_device", lambda _: torch.device("meta"))
    monkeypatch.setattr(hf_model, "choose_path", choose)
    model = moved_model("qwen3")
    hf_model.prepared(model, TWO)
    assert seen == [("meta", 2, hf_model.no_kernels)]
    assert model.device.type == "cpu"
