"""Values that do not fit together here are changed, and a line tells each change."""

from __future__ import annotations

from typing import Any

from tailrace_cli.importing.fitting import fitted


def with_strategy(**more: Any) -> dict[str, Any]:
    """An experiment whose learner shares layers among four ranks."""
    args = {"strategy_name": "megatron", "num_ranks": 4, "tensor_parallel_size": 2}
    return {"learner": {"strategy_args": args, **more}}


def test_adapters_do_not_stay_with_a_strategy_that_takes_none() -> None:
    content = with_strategy(lora={"r": 8})
    lines = list(fitted(content))
    assert content["learner"]["strategy_args"] == {"strategy_name": "fsdp2", "num_ranks": 4}
    assert len(lines) == 1
    assert "fsdp2, not megatron (2 ranks share the layers there), whose layers take no" in lines[0]


def test_all_weights_stay_with_their_strategy() -> None:
    content = with_strategy()
    assert not list(fitted(content))
    assert content == with_strategy()
