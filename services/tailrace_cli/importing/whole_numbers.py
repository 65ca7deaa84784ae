"""Numbers of other systems that are written as floats (`1e3`) where ours are whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

from tailrace.config import SECTIONS, RunConfig
from tailrace_cli.experiment import Experiment


def with_whole_numbers(content: Mapping[str, Any]) -> dict[str, Any]:
    """The experiment; floats without a fraction are integers where a key takes integers alone."""
    hints = get_type_hints(Experiment)
    sections = {field.name: hints[field.name] for field in dataclasses.fields(Experiment)}
    whole: dict[str, Any] = {}
    for key, value in content.items():
        info = msgspec.inspect.type_info(sections[key] if key in SECTIONS else RunConfig)
        whole[key] = _read(value, info if key in SECTIONS else _field(info, key))
    return whole


def _read(value: Any, info: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _read(inner, _field(info, key)) for key, inner in value.items()}
    types = getattr(info, "types", (info,))
    is_whole = any(isinstance(each, msgspec.inspect.IntType) for each in types)
    takes_floats = any(isinstance(each, msgspec.inspect.FloatType) for each in types)
    if is_whole and not takes_floats and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _field(info: Any, key: Any) -> Any:
    """The type at `key` of a Struct or dict, optional or not; None: there is no such key."""
    for inner in getattr(info, "types", (info,)):
        for field in getattr(inner, "fields", ()):
            if field.encode_name == key:
                return field.type
        if isinstance(inner, msgspec.inspect.DictType):
            return inner.value_type
    return None
