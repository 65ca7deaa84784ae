"""Recorded rounds of sessions as episodes: TraceLab's replay format and logs, Mooncake's requests."""

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tailrace.config import ConfigError
from tailrace_cli.simulation.reading import (
    MOST_TOKENS,
    MOST_WAIT_S,
    Milliseconds,
    Tokens,
    decoded,
    text_of,
)
from tailrace_cli.simulation.workload import EpisodePlan, TurnPlan
from tailrace_protos.base import UNREADABLE

_COUNTS = ("round_idx", "prefix_len", "input_len", "output_len")
_WAIT = "tool_wait_after_ms"
COLUMNS = ("session_id", *_COUNTS, _WAIT)


class Round(NamedTuple):
    """One call of a session."""

    session: str
    place: int  # in the session
    context_tokens: int  # of the call: what the session had before, and what is new
    output_tokens: int
    wait_s: float  # until the next call


class _Tool(msgspec.Struct):
    tool_wall_latency_ms: Milliseconds | None = None


class _Logged(msgspec.Struct):
    """A line of TraceLab's logs; the tools of a round run at once."""

    session_id: str
    round_index: Tokens
    input_tokens_total: Tokens
    output_tokens: Tokens
    tools: list[_Tool] = []

    def as_round(self, _line: int) -> Round:
        wait_ms = max((tool.tool_wall_latency_ms or 0.0 for tool in self.tools), default=0.0)
        tokens = self.input_tokens_total, self.output_tokens
        return Round(self.session_id, self.round_index, *tokens, wait_ms / 1000)


class _Request(msgspec.Struct):
    """A line of Mooncake's traces: a request without a session, so an episode of one turn."""

    input_length: Tokens
    output_length: Tokens

    def as_round(self, line: int) -> Round:
        return Round(str(line), 0, self.input_length, self.output_length, 0.0)


_LINES: dict[str, type[_Logged | _Request]] = {  # by a key that other lines lack
    "input_tokens_total": _Logged,
    "input_length": _Request,
}


def plans_of_rounds(rounds: Iterable[Round], scale: float) -> list[EpisodePlan]:
    """Returns an episode for each session; `scale` multiplies its tokens."""
    sessions: dict[str, list[Round]] = defaultdict(list)
    for one in rounds:
        sessions[one.session].append(one)
    return [_plan(sorted(session, key=lambda one: one.place), scale) for session in sessions.values()]


def _plan(rounds: list[Round], scale: float) -> EpisodePlan:
    turns, seen = [], 0
    for one in rounds:
        new = max(int(scale * (one.context_tokens - seen)), 1)  # less than 0: the session was cut
        turns.append(TurnPlan(new, max(int(scale * one.output_tokens), 1), one.wait_s))
        seen = one.context_tokens + one.output_tokens
    return (*turns[:-1], turns[-1]._replace(tool_s=0.0))


def rounds_of_csv(path: Path) -> Iterator[Round]:
    """Yields the rounds of a file in TraceLab's replay format. Raises `ConfigError`."""
    reader = csv.DictReader(io.StringIO(text_of("--trace", path), newline=""))
    try:
        missing = [one for one in COLUMNS if one not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"lacks the columns {', '.join(missing)}")
        for row in reader:
            place, prefix, new, output = (int(_number(row, column, int)) for column in _COUNTS)
            wait_s = _number(row, _WAIT, float) / 1000
            yield Round(row["session_id"], place, prefix + new, output, wait_s)
    except (csv.Error, ValueError) as error:
        raise ConfigError(f"--trace {path}, line {max(reader.line_num, 1)}: {error}") from None


def _number(row: dict[str, Any], column: str, kind: type[int] | type[float]) -> float:
    most = MOST_TOKENS if kind is int else 1000 * MOST_WAIT_S
    whole = "whole " if kind is int else ""
    expected = f"column {column}: expected a {whole}number from 0 to {most:,}, found {row[column]!r}"
    try:
        value = kind(row[column] or "")
    except ValueError:
        raise ValueError(expected) from None
    if not 0 <= value <= most:  # NaN is no number either
        raise ValueError(expected)
    return value


def has_rounds(path: Path) -> bool:
    """Tells whether the first line of a `.jsonl` is a round."""
    return _kind(next(_lines(path), (0, ""))[1]) is not None


def rounds_of_lines(path: Path) -> Iterator[Round]:
    """Yields the rounds of a `.jsonl`. Raises `ConfigError`."""
    kind: type[_Logged | _Request] | None = None
    for number, line in _lines(path):
        kind = kind or _kind(line)
        assert kind is not None, "see `has_rounds`"
        place = f"--trace {path}, line {number}"
        yield decoded(line, kind, place, "give lines as the first one is").as_round(number)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines with their numbers; empty ones are left out."""
    lines = text_of("--trace", path).split("\n")
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _kind(line: str) -> type[_Logged | _Request] | None:
    try:
        keys = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except UNREADABLE:
        return None
    return next((kind for key, kind in _LINES.items() if key in keys), None)
