"""AReaL's words for engines and ranks on devices: `sglang:d4+fsdp:d2`, or one backend for each role."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tailrace.config.settings.setting import Lookup, choice
from tailrace_cli.importing import words

STRATEGY = "learner.strategy_args"
RANKS = tuple(f"{STRATEGY}.{key}" for key in ("num_ranks", "tensor_parallel_size", "strategy_name"))
ENGINES = "cluster.num_inference_servers"
_SIZES = r"(?:[dtpce]\d+)+"
_PLAN = re.compile(rf"(?:[a-z]+[:.])?({_SIZES})(?:\+(?:([a-z]+)[:.])?({_SIZES}))?")
_BACKEND = re.compile(rf"([a-z]\w*)(?:[:.]({_SIZES}))?")
_STRATEGIES = choice("megatron", fsdp="fsdp2")


def allocation(plan: Any, lookup: Lookup) -> Mapping[str, Any]:
    """`sglang:d4t1p1+d2t1p1`: engines and ranks that share the work; others are refused.

    With `megatron` ranks may share layers too: `sglang:d4+megatron:d2t2`.
    """
    found = _PLAN.fullmatch(str(plan))
    if not found:
        raise ValueError("expected engines and ranks, like sglang:d4+d4")
    engines, backend, ranks = found.groups()
    cuts = "megatron" in (backend, lookup(f"{STRATEGY}.strategy_name"))
    return {ENGINES: _sizes(engines, "d")[0], **_ranks(ranks or "d1", cuts)}


def trained_by(backend: Any, _lookup: Lookup) -> Mapping[str, Any]:
    """`fsdp:d4`, `megatron:d2t2`, or the name alone."""
    found = _BACKEND.fullmatch(str(backend))
    if not found:
        raise ValueError("expected a backend and its ranks, like fsdp:d4")
    name = _STRATEGIES(found[1])
    ranks = _ranks(found[2], name == "megatron") if found[2] else {}
    return {**ranks, f"{STRATEGY}.strategy_name": name}


def served_by(backend: Any, _lookup: Lookup) -> Mapping[str, Any]:
    """`sglang:d4`: engines, whatever their name."""
    found = _BACKEND.fullmatch(str(backend))
    if not found or not found[2]:
        raise ValueError(f"expected a number of engines, like sglang:d4; {words.NO_ENGINE}")
    return {ENGINES: _sizes(found[2], "d")[0]}


def _ranks(part: str, cuts: bool) -> Mapping[str, Any]:
    num_groups, size = _sizes(part, "dt" if cuts else "d")
    ours = {f"{STRATEGY}.num_ranks": num_groups * size}
    if not cuts:
        return ours
    of_cut = {f"{STRATEGY}.strategy_name": "megatron", f"{STRATEGY}.tensor_parallel_size": size}
    return {**ours, **of_cut}


def _sizes(part: str, allowed: str) -> tuple[int, int]:
    """How many share the work, and how many of them share layers."""
    sizes = {kind: int(size) for kind, size in re.findall(r"([dtpce])(\d+)", part)}
    if any(size != 1 for kind, size in sizes.items() if kind not in allowed):
        raise ValueError(f"{part}: {words.PARALLEL}")
    return sizes.get("d", 1), sizes.get("t", 1)
