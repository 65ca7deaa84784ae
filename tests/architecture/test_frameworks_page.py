"""The page of frameworks shows the table that `make test-frameworks` plays."""

from pathlib import Path

from tests.frameworks.table import FRAMEWORKS, page_table

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_table_of_the_test() -> None:
    assert page_table(ROOT / "tests" / "frameworks") in (ROOT / "docs" / "frameworks.md").read_text()


def test_twenty_frameworks_have_a_player_each() -> None:
    players = {path.stem for path in (ROOT / "tests" / "frameworks" / "agents").glob("*_player.py")}
    assert players == {one.player for one in FRAMEWORKS}
    assert len({one.package for one in FRAMEWORKS}) >= 20
