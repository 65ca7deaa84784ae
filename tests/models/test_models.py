"""`docs/models.md` says what engine, learner and LoRA do with each entry of the zoo."""

from __future__ import annotations

import pytest

from tests.models.judge import verdict
from tests.models.page import PAGE, head, line, lines_of
from tests.models.zoo import ZOO

pytestmark = pytest.mark.models


@pytest.mark.parametrize("name", ZOO)
def test_a_model_is_computed_as_the_page_says(name: str) -> None:
    assert lines_of(PAGE.read_text()).get(name) == line(name, verdict(name))


def test_the_page_lists_the_zoo() -> None:
    text = PAGE.read_text()
    assert list(lines_of(text)) == list(ZOO)
    assert text.startswith(head())
    assert len({name.partition(":")[0] for name in ZOO}) >= 60
