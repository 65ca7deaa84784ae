"""Leases, finished calls and arguments: the parts of tools that need no server."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from tailrace.sdk.tool import ArgumentsError, Tool, ToolOffer
from tailrace.tools.calls import MAX_AGE_S, FinishedCalls, Leases
from tailrace.tools.conversion import checker, parse_arguments
from tailrace_protos.tool import ToolResult


def result(call_id: str, content: str = "") -> ToolResult:
    return ToolResult(call_id, "t", content)


def test_a_lease_ends_when_its_caller_was_silent_for_longer_than_promised() -> None:
    leases = Leases()
    leases.begin("short", 1.0, now_s=0.0)
    leases.begin("long", 5.0, now_s=0.0)
    leases.begin("none", 0.0, now_s=0.0)
    assert leases.expired(1.0) == []
    assert leases.expired(1.1) == ["short"]
    leases.renew(["short", "unknown"], now_s=1.1)
    assert leases.expired(2.0) == []
    assert leases.expired(100.0) == ["short", "long"]
    leases.renew_all(100.0)
    assert leases.expired(100.5) == []
    leases.end("long")
    assert leases.expired(1000.0) == ["short"]


def test_finished_calls_are_forgotten_by_age_number_and_size() -> None:
    finished = FinishedCalls(max_results=3, max_bytes=4096)
    for number in range(5):
        finished.add(result(str(number)), now_s=0.0)
    assert [finished.get(str(number)) is not None for number in range(5)] == [False] * 2 + [True] * 3
    finished.add(result("big", "x" * 3500), now_s=0.0)
    assert finished.get("4") is not None
    assert finished.get("3") is None
    finished.add(result("huge", "x" * 5000), now_s=0.0)
    assert finished.get("huge") is None
    finished.add(result("late"), now_s=MAX_AGE_S + 1)
    assert finished.get("big") is None
    assert finished.get("late") is not None


def test_a_call_finished_twice_keeps_its_first_result() -> None:
    finished = FinishedCalls()
    finished.add(result("c", "first"), now_s=0.0)
    finished.add(result("c", "second"), now_s=0.0)
    assert finished.get("c") == result("c", "first")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": ', "not valid JSON"),
        ("[1, 2]", "found an array"),
        ('"text"', "found a string"),
        ("3", "found a number"),
        ("null", "found null"),
        ('{"a": "\\ud800"}', "not valid JSON"),
        ('{"a": "\ud800"}', "not valid JSON"),
        ("[" * 10_000, "not valid JSON"),
    ],
)
def test_arguments_that_are_no_json_object_are_explained(text: str, words: str) -> None:
    with pytest.raises(ArgumentsError, match=words):
        parse_arguments(text)


def test_no_arguments_at_all_are_an_empty_object() -> None:
    assert parse_arguments("") == parse_arguments(" \n") == parse_arguments("{}") == {}


def test_a_schema_is_checked_when_it_is_offered_and_names_every_fault_of_a_call() -> None:
    class Picky(Tool):
        name = "picky"
        parameters = {  # noqa: RUF012
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
            "required": ["a"],
        }

    check = checker(ToolOffer.of(Picky))
    assert check({"a": 1, "b": "x"}) == {"a": 1, "b": "x"}
    with pytest.raises(ArgumentsError) as caught:
        check({"a": "1", "b": "z"})
    assert (
        str(caught.value)
        == "'1' is not of type 'integer' - at `a`; 'z' is not one of ['x', 'y'] - at `b`"
    )
    nested: dict[str, Any] = {}
    for _ in range(2000):
        nested = {"not": nested}
    for parameters, reason in (({"properties": 3}, "3 is not"), (nested, "nested too deeply")):
        broken = ToolOffer.of(Picky, parameters={"type": "object", **parameters})
        with pytest.raises(ValueError, match=f"'picky': parameters are not a JSON Schema: {reason}"):
            checker(broken)


@pytest.mark.parametrize("text", ["a" * 40 + "!", 0], ids=["pattern", "many paths"])
def test_a_check_of_arguments_ends(text: object) -> None:
    """A pattern with many ways to match, or definitions with 2^40 ways to the last."""
    paths: dict[str, Any] = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}

    class Slow(Tool):
        name = "slow"
        parameters: ClassVar[dict[str, Any]] = {
            "properties": {"x": {"$ref": "#/$defs/a0"}},
            "$defs": {**paths, "a40": {"type": "string", "pattern": "^(a|a?)+$"}},
        }

    with pytest.raises(ArgumentsError, match="check by the schema takes more than"):
        checker(ToolOffer.of(Slow))({"x": text})
