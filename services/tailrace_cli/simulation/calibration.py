"""Costs of a real engine, fitted to the reports that its servers made in a run (`engines.jsonl`).

Between two reports of a server the seconds with open calls are a sum over its work, as in
`EngineModel`: `a_s * steps + c_s * sampled + d_s * (KV read by the steps) + e_s * prefilled`. So what
a server does for calls and replies between its steps is a part of their costs. An engine that does not
count the KV that it reads (sglang) had the mean of both reports in each step. Costs are positive; the
fit makes the sum of squared *relative* errors least.
"""

import statistics
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import asdict

from tailrace.config import ConfigError
from tailrace_cli.simulation.reading import MOST_TOKENS, Tokens, decoded, text_of
from tailrace_protos.base import UNREADABLE
from tailrace_protos.control import ServerStatus

MIN_INTERVALS = 8
LEAST_COST_S = 1e-12
COSTS = ("a_s", "c_s", "d_s", "e_s")
_Cost = Annotated[float, Meta(ge=1e-15, le=1000)]  # seconds
_Size = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]


class _CostsFile(msgspec.Struct, forbid_unknown_fields=True):
    """Fields of `EngineModel` that a file may give."""

    a_s: _Cost | None = None
    c_s: _Cost | None = None
    d_s: _Cost | None = None
    e_s: _Cost | None = None
    restore_s: _Cost | None = None
    kv_tokens: _Size | None = None
    max_running: _Size | None = None
    host_kv_tokens: Tokens | None = None


class Interval(NamedTuple):
    """Work of a server between two of its reports."""

    work: tuple[float, float, float, float]  # steps, sampled tokens, KV tokens read, prefilled tokens
    busy_s: float


class Calibration(NamedTuple):
    """Fitted costs."""

    costs: dict[str, float]  # as `--engine` of `tailrace simulate` reads them, with K, R and host KV
    num_intervals: int
    median_error: float  # |fitted - measured| / measured seconds of an interval


def read_costs(path: Path | None) -> dict[str, Any]:
    """Reads the file of `--engine`; without one, nothing is given. Raises `ConfigError`."""
    if path is None:
        return {}
    remedy = f"give a JSON object of {', '.join(_CostsFile.__struct_fields__)}"
    found = decoded(text_of("--engine", path), _CostsFile, f"--engine {path}", remedy)
    return {key: value for key, value in asdict(found).items() if value is not None}


def read_reports(path: Path) -> list[ServerStatus]:
    """Reads `engines.jsonl`; a torn last line is left out. Raises `ConfigError`."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; the scheduler writes it while inference servers work"
        ) from error
    try:
        return [msgspec.json.decode(line, type=ServerStatus) for line in lines]
    except UNREADABLE as error:
        raise ConfigError(f"{path} holds a line that is no report: {error}") from error


def intervals_of(reports: Iterable[ServerStatus]) -> Iterator[Interval]:
    """Yields the work between reports of one start of a server."""
    newest: dict[str, ServerStatus] = {}
    for now in reports:
        before = newest.get(now.server_id)
        newest[now.server_id] = now
        if before is None or before.incarnation != now.incarnation:
            continue
        steps = now.num_steps - before.num_steps
        sampled = now.num_generated_tokens - before.num_generated_tokens
        computed = now.num_computed_tokens - before.num_computed_tokens
        busy_s = now.busy_s - before.busy_s
        if steps > 0 and busy_s > 0:
            read: float = now.num_read_tokens - before.num_read_tokens
            if not now.num_read_tokens:
                read = steps * (before.used_tokens + now.used_tokens) / 2
            yield Interval((steps, sampled, read, max(computed - sampled, 0)), busy_s)


def fit(reports: list[ServerStatus]) -> Calibration:
    """Fits costs to reports; raises `ConfigError` if there are too few."""
    intervals = list(intervals_of(reports))
    if len(intervals) < MIN_INTERVALS:
        raise ConfigError(
            f"{len(intervals)} pairs of reports with steps between them, {MIN_INTERVALS} are needed: "
            "take a longer run, on an engine that counts its steps (torch, vllm, sglang)"
        )
    measured = np.array([interval.busy_s for interval in intervals])
    work = np.array([interval.work for interval in intervals]) / measured[:, None]  # [intervals, 4]
    costs = _not_negative(work)
    errors = np.abs(work @ costs - 1)
    newest = reports[-1]
    limits = {
        "kv_tokens": newest.capacity_tokens,
        "max_running": newest.max_running,
        "host_kv_tokens": newest.host_capacity_tokens,
    }
    found = {name: max(float(cost), LEAST_COST_S) for name, cost in zip(COSTS, costs, strict=True)}
    return Calibration(found | limits, len(intervals), statistics.median(errors))


def _not_negative(work: np.ndarray) -> np.ndarray:
    """Least squares of `work @ costs = 1` over costs >= 0: the best of all choices of costs above 0."""
    scale = np.maximum(np.abs(work).max(axis=0), 1e-30)
    best, least = np.zeros(len(COSTS)), float(len(work))
    for count in range(1, len(COSTS) + 1):
        for columns in map(list, combinations(range(len(COSTS)), count)):
            part = work[:, columns] / scale[columns]
            found, *_ = np.linalg.lstsq(part, np.ones(len(work)), rcond=None)
            error = float(((part @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(len(COSTS)), error
                best[columns] = found / scale[columns]
    return best
