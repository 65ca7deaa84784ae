"""Schemas from signatures and docstrings."""

from __future__ import annotations

import dataclasses
import enum
from typing import Annotated, Any, Literal

import pytest

from tailrace.sdk.signature import ArgumentsError, parse_docstring
from tailrace.sdk.tool import Tool, ToolOffer, as_offer, tool


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Point:
    x: float
    y: float = 0.0


@dataclasses.dataclass
class Tree:
    value: int
    children: list[Tree]


@tool
def paint(
    where: Point,
    colour: Colour,
    times: Annotated[int, "how often"] = 1,
    style: Literal["thin", "thick"] = "thin",
    labels: list[str] | None = None,
    corners: tuple[int, ...] = (1, 2),
) -> str:
    """Paint a point.

    It dries at once.

    Args:
        where: the point,
            in metres
        colour (Colour): its colour
    """
    return f"{where.x:g},{where.y:g} {colour.name} {times} {style} {labels} {corners}"


def test_types_defaults_and_meanings_become_one_self_contained_schema() -> None:
    assert paint.spec.description == "Paint a point.\n\nIt dries at once."
    schema = paint.spec.parameters
    assert schema["required"] == ["where", "colour"]
    assert schema["additionalProperties"] is False
    assert "$defs" not in schema
    properties = schema["properties"]
    assert properties["where"]["description"] == "the point, in metres"
    assert properties["where"]["properties"]["x"] == {"type": "number"}
    assert properties["colour"]["enum"] == ["blue", "red"]
    assert properties["colour"]["description"] == "its colour"
    assert properties["times"] == {"type": "integer", "default": 1, "description": "how often"}
    assert properties["style"] == {"enum": ["thick", "thin"], "default": "thin"}
    assert properties["labels"]["anyOf"] == [
        {"type": "array", "items": {"type": "string"}},
        {"type": "null"},
    ]


def test_a_default_of_none_may_be_given_as_null() -> None:
    @tool
    def find(text: str, limit: int = None, place: Any = None) -> str:  # type: ignore[assignment]  # noqa: RUF013
        """Find a text.

        Args:
            limit: how many
        """
        return f"{text} {limit} {place}"

    limit = find.spec.parameters["properties"]["limit"]
    assert limit["anyOf"] == [{"type": "integer"}, {"type": "null"}]
    assert (limit["default"], limit["description"]) == (None, "how many")
    assert find.bind({"text": "x", "limit": None})["limit"] is None
    with pytest.raises(ArgumentsError, match="limit"):
        find.bind({"text": "x", "limit": "two"})


def test_arguments_arrive_with_the_types_of_the_signature() -> None:
    arguments = {"where": {"x": 1}, "colour": "red", "labels": ["a"]}
    assert paint.function(**paint.bind(arguments)) == "1,0 RED 1 thin ['a'] (1, 2)"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"colour": "red"}, "missing required field `where`"),
        ({"where": {"x": "far"}, "colour": "red"}, "Expected `float`, got `str` - at `where.x`"),
        ({"where": {"x": 1}, "colour": "green"}, "Invalid enum value 'green' - at `colour`"),
        ({"where": {"x": 1}, "colour": "red", "size": 3}, "unknown field `size`"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentsError) as caught:
        paint.bind(arguments)
    assert words in str(caught.value)


def test_a_type_that_contains_itself_keeps_its_reference() -> None:
    @tool
    def total(tree: Tree) -> int:
        return tree.value + sum(child.value for child in tree.children)

    assert total.spec.parameters["properties"]["tree"] == {"$ref": "#/$defs/Tree"}
    assert set(total.spec.parameters["$defs"]) == {"Tree"}
    bound = total.bind({"tree": {"value": 1, "children": [{"value": 2, "children": []}]}})
    assert total.function(**bound) == 3


@pytest.mark.parametrize(
    "docstring",
    [
        "Do it.\n\n:param int size: how big\n  it is\n:returns: nothing",
        "Do it.\n\nParameters\n----------\nsize : int\n    how big\n    it is\n\nReturns\n-------\nstr",
        "Do it.\n\nArgs:\n    size (int): how big\n        it is\n\nReturns:\n    text: words",
    ],
)
def test_the_usual_styles_of_docstrings_are_read(docstring: str) -> None:
    assert parse_docstring(docstring) == ("Do it.", {"size": "how big it is"})


def test_what_no_model_could_call_is_refused_when_it_is_marked() -> None:
    with pytest.raises(TypeError, match="need names"):
        tool(lambda *numbers: sum(numbers))

    def strange(value: object, when: Ellipsis) -> None: ...  # type: ignore[valid-type]

    strange.__annotations__ = {"value": type("Unknown", (), {"__init__": None})}
    with pytest.raises(TypeError, match="types that JSON can carry"):
        tool(strange)
    with pytest.raises(ValueError, match="letters, digits"):
        tool(name="not a name")(len_of)
    with pytest.raises(ValueError, match="must be positive"):
        tool(timeout_s=0)(len_of)


def len_of(text: str) -> int:
    return len(text)


def test_what_can_be_served_is_told_from_what_cannot() -> None:
    class Stateful(Tool):
        name = "stateful"

    class Stateless(Tool):
        name = "stateless"
        is_stateful = False

    one = Stateless()
    assert as_offer(Stateful).spec.is_stateful
    shared = as_offer(one)
    assert isinstance(shared, ToolOffer)
    assert shared() is one
    assert ToolOffer.of(Stateful, timeout_s=3).spec.timeout_s == 3
    with pytest.raises(TypeError, match="every episode needs an object of its own"):
        as_offer(Stateful())
    with pytest.raises(TypeError, match="mark a function with @tool"):
        as_offer(len_of)  # type: ignore[arg-type]


def test_only_types_of_parameters_must_be_known() -> None:
    def table(num_rows: int) -> Frame:  # type: ignore[name-defined]  # noqa: F821  of TYPE_CHECKING
        """Make a table."""

    def save(frame: Frame) -> int:  # type: ignore[name-defined]  # noqa: F821
        """Save a table."""
        return 0

    assert tool(table).bind({"num_rows": 2}) == {"num_rows": 2}
    with pytest.raises(TypeError, match=r"save: the type of a parameter is not known .*'Frame'"):
        tool(save)


def test_a_function_written_in_c_has_types_or_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="len"):
        tool(len)
