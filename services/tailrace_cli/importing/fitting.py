"""Changes values of an imported experiment that do not fit together here; a line tells each change."""

from collections.abc import Iterator
from typing import Any

from tailrace.config.settings import set_at, value_at

_STRATEGY = "learner.strategy_args"
_KEEPS_MEMORY = ("megatron", "deepspeed")


def fitted(content: dict[str, Any]) -> Iterator[str]:
    """Changes `content` in its place, and yields a line for every key that has another value now."""
    yield from _fit_length(content)
    yield from _fit_strategy(content)


def _fit_length(content: dict[str, Any]) -> Iterator[str]:
    """Lowers the length of episodes, often a sum or a default, to the longest row of the engine."""
    length = value_at(content, "agents.max_episode_tokens")
    room = value_at(content, "inference.max_model_len")
    if isinstance(length, int) and isinstance(room, int) and 0 < room < length:
        set_at(content, "agents.max_episode_tokens", room)
        yield f"agents.max_episode_tokens: {room}, the longest row of the engine, not {length}"


def _fit_strategy(content: dict[str, Any]) -> Iterator[str]:
    """Replaces a strategy that keeps its memory where roles share GPUs, or that takes no adapters."""
    strategy = value_at(content, f"{_STRATEGY}.strategy_name")
    if value_at(content, "colocated") is True and strategy in _KEEPS_MEMORY:
        reason = "which cannot give its memory to engines on the same GPUs"
    elif value_at(content, "learner.lora") is not None and strategy == "megatron":
        reason = "whose layers take no adapters (learner.lora)"
    else:
        return
    args = content["learner"]["strategy_args"]
    cut = args.pop("tensor_parallel_size", 1)
    args.pop("zero_stage", None)
    args["strategy_name"] = "single" if args.get("num_ranks", 1) == 1 else "fsdp2"
    cuts = f" ({cut} ranks share the layers there)" if cut != 1 else ""
    yield f"{_STRATEGY}.strategy_name: {args['strategy_name']}, not {strategy}{cuts}, {reason}"
