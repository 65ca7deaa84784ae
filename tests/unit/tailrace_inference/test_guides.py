"""Guides that no engine can follow."""

from __future__ import annotations

import pytest

from tailrace_inference.core.requests import InvalidRequestError
from tailrace_inference.engine.guided import Guides
from tailrace_protos.generation import Guide
from tests.unit.tailrace_inference.harness import VOCAB_SIZE
from tests.unit.tailrace_inference.test_engine_calls import letters


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema = '{"items":' * 5000 + "{}" + "}" * 5000
    with pytest.raises(InvalidRequestError, match=r"^guide: "):
        Guides(letters(), VOCAB_SIZE).matcher(Guide(schema), (2,), ())
