"""Rules for engines and ranks of AReaL: `sglang:d4+fsdp:d2`, or one backend for each role."""

import re
from collections.abc import Mapping
from typing import Any

from tailrace.config.settings import Lookup, value_names
from tailrace_cli.importing import value_names as names

STRATEGY = "learner.strategy_args"
RANKS = tuple(f"{STRATEGY}.{key}" for key in ("num_ranks", "tensor_parallel_size", "strategy_name"))
ENGINES = (
    "cluster.num_inference_servers",
    "inference.engine",
    "inference.tensor_parallel_size",
    "inference.pipeline_parallel_size",
)
_SIZES = r"(?:[dtpce]\d+)+"
_PLAN = re.compile(rf"(?:([a-z]+)[:.])?({_SIZES})(?:\+(?:([a-z]+)[:.])?({_SIZES}))?")
_BACKEND = re.compile(rf"([a-z]\w*)(?:[:.]({_SIZES}))?")
_STRATEGIES = value_names("megatron", fsdp="fsdp2", archon="fsdp2")  # archon: torchtitan's FSDP


def allocation(plan: Any, lookup: Lookup) -> Mapping[str, Any]:
    """Engines and data-parallel ranks from `sglang:d4t1p1+d2t1p1`.

    With `megatron`, ranks may share layers too: `sglang:d4+megatron:d2t2`.
    """
    found = _PLAN.fullmatch(str(plan))
    if not found:
        raise ValueError("expected engines and ranks, like sglang:d4+d4")
    engine, engines, backend, ranks = found.groups()
    cuts = "megatron" in (backend, lookup(f"{STRATEGY}.strategy_name"))
    return {**_engines(engine, engines), **_ranks(ranks or "d1", cuts)}


def trained_by(backend: Any, _lookup: Lookup) -> Mapping[str, Any]:
    """Strategy and ranks from `fsdp:d4`, `megatron:d2t2`, or the strategy from its name alone."""
    found = _BACKEND.fullmatch(str(backend))
    if not found:
        raise ValueError("expected a backend and its ranks, like fsdp:d4")
    name = _STRATEGIES(found[1])
    ranks = _ranks(found[2], name == "megatron") if found[2] else {}
    return {**ranks, f"{STRATEGY}.strategy_name": name}


def served_by(backend: Any, _lookup: Lookup) -> Mapping[str, Any]:
    """Engines from `sglang:d4t2`: their number, and the GPUs of each."""
    found = _BACKEND.fullmatch(str(backend))
    if not found or not found[2]:
        raise ValueError("expected an engine and its number, like sglang:d4 or vllm:d2t2")
    return _engines(found[1], found[2])


def _engines(name: str | None, part: str) -> Mapping[str, Any]:
    num_engines, tensor, pipeline = _sizes(part, "dtp")
    ours: dict[str, Any] = {ENGINES[0]: num_engines}
    if name is not None:
        ours[ENGINES[1]] = names.engine(name)
    if tensor * pipeline > 1:
        ours |= {ENGINES[2]: tensor, ENGINES[3]: pipeline}
    return ours


def _ranks(part: str, cuts: bool) -> Mapping[str, Any]:
    num_groups, size, _ = _sizes(part, "dt" if cuts else "d")
    ours = {f"{STRATEGY}.num_ranks": num_groups * size}
    if not cuts:
        return ours
    of_cut = {f"{STRATEGY}.strategy_name": "megatron", f"{STRATEGY}.tensor_parallel_size": size}
    return {**ours, **of_cut}


def _sizes(part: str, allowed: str) -> tuple[int, int, int]:
    """Number of groups, of devices in a group that share layers, and of its stages."""
    sizes = {kind: int(size) for kind, size in re.findall(r"([dtpce])(\d+)", part)}
    if any(size != 1 for kind, size in sizes.items() if kind not in allowed):
        raise ValueError(f"{part}: {names.ONE_DEVICE}")
    return sizes.get("d", 1), sizes.get("t", 1), sizes.get("p", 1)
