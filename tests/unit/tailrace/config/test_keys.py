"""Keys of a configuration Struct: names, types, units, defaults and prose of the reference."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from tailrace.config import Config
from tailrace.config.keys import Key, fields_of, keys_of, literals_in, type_at


class Optimizer(Config, frozen=True, kw_only=True):
    rate: float = 0.5
    """Step size."""


class Base(Config, frozen=True, kw_only=True):
    drain_s: float = 1.0
    """Time to end
    work."""


class Service(Base, frozen=True, kw_only=True):
    name: str
    """Its name."""

    mode: Literal["fast", "safe"] | None = None
    """How."""

    optimizer: Optimizer = Optimizer(rate=0.25)
    """Optimizer."""

    parts: dict[str, Optimizer] = msgspec.field(default_factory=dict)
    """By name."""

    rows: tuple[Optimizer, ...] = ()
    """In order."""

    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Anything."""


INFO = msgspec.inspect.type_info(Service)


def test_every_key_has_type_default_unit_and_prose() -> None:
    assert list(keys_of(Service, "s")) == [
        Key("s.drain_s", "number", "1.0", "seconds", "Time to end work."),
        Key("s.name", "text", "required", "", "Its name."),
        Key("s.mode", "`fast` or `safe` or null", "null", "", "How."),
        Key("s.optimizer", "section", '{"rate":0.25}', "", "Optimizer."),
        Key("s.optimizer.rate", "number", "0.5", "", "Step size."),
        Key("s.parts", "section by name", "{}", "", "By name."),
        Key("s.parts.*.rate", "number", "0.5", "", "Step size."),
        Key("s.rows", "list of section", "[]", "", "In order."),
        Key("s.rows.*.rate", "number", "0.5", "", "Step size."),
        Key("s.options", "any by name", "{}", "", "Anything."),
    ]


@pytest.mark.parametrize("path", ["optimizer", "parts.x", "parts[...]", "rows[1]"])
def test_a_path_leads_to_the_struct_there(path: str) -> None:
    assert fields_of(type_at(INFO, path)) == ["rate"]


def test_a_path_to_nothing_has_no_type_and_free_options_have_any() -> None:
    assert type_at(INFO, "optimizer.speed") is None
    assert type_at(INFO, "rows.rate") is None
    assert isinstance(type_at(INFO, "options.a.b.c"), msgspec.inspect.AnyType)


def test_names_of_a_literal_are_found_behind_an_optional() -> None:
    assert literals_in(type_at(INFO, "mode")) == ["fast", "safe"]
    assert literals_in(type_at(INFO, "name")) == []
