"""Live view in tmux and report in a browser: at 80 and 160 columns, light and dark, all is there.

Makes the pictures with the functions of `docs/make_pictures.py`, from a run that a script plays.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image
from rich.text import Text

from tailrace_cli.reporting.pages import RunReport
from tailrace_cli.run_folders import RunFolder
from tests.unit.tailrace_cli.test_report import make_run

ROOT = Path(__file__).parents[3]
BROWSER = shutil.which("chromium")
COLUMNS = (160, 80)
SCHEMES = ("light", "dark")
VIEW = """
import time
from tailrace_cli.console import plain_console
from tailrace_cli.live_view import ProgressView
from tests.unit.tailrace_cli.test_failures_shown import status
with ProgressView(plain_console(), "lake") as view:
    while True:
        view.update(status(step=25, max_steps=100, success_rate=0.5, eval_success_rate=0.25,
            eval_greedy_success_rate=0.375, policy_version=12, num_failures=3, reward_mean=0.625,
            newest_failure="a tool did not answer", tokens_per_s=1234.0, staleness_mean=1.5,
            hints=("most groups are all equal",), eta_s=60.0))
        time.sleep(0.1)
"""
SHOWN = (
    "lake  training  step 25/100", "success 0.500", "held-out sampled 0.250", "held-out greedy 0.375",
    "failed 3", "version 12", "reward 0.625", "staleness 1.50", "tokens/s 1,234", "ETA 60 s",
    "failed episodes: 3; the newest: a tool did not answer", "hint: most groups are all equal",
)  # fmt: skip
EACH_ONCE = dict.fromkeys(SHOWN, 1)

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux on this machine")


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    """The script that makes the pictures of the docs."""
    spec = importlib.util.spec_from_file_location("make_pictures", ROOT / "docs" / "make_pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def counts(screen: str) -> dict[str, int]:
    """Times that each of `SHOWN` stands on a screen."""
    text = Text.from_ansi(screen).plain
    return {shown: text.count(shown) for shown in SHOWN}


@pytest.fixture(scope="module")
def screens() -> Iterator[dict[int, str]]:
    """Screen of the live view by columns: the terminal is made narrower while it is shown."""
    name = f"tailrace-{uuid.uuid4().hex}"  # other suites of this user have servers too, or left some

    def tmux(*words: str) -> str:
        # Without `env` children get COLUMNS, which readline sets behind the back of Python.
        return subprocess.run(
            ["tmux", "-L", name, *words],
            check=True, capture_output=True, text=True, cwd=ROOT, env=os.environ,
        ).stdout  # fmt: skip

    def settled() -> str:
        """The screen once it shows everything in its width, twice the same."""
        deadline_s, before = time.monotonic() + 120, ""
        while True:
            time.sleep(0.2)
            screen = tmux("capture-pane", "-e", "-p", "-t", "view").strip("\n")
            if screen == before and counts(screen) == EACH_ONCE:
                return screen
            before = screen
            assert time.monotonic() < deadline_s, screen

    size = ("-x", str(COLUMNS[0]), "-y", "14")
    tmux("new-session", "-d", "-s", "view", *size, sys.executable, "-c", VIEW)
    try:
        found = {}
        for columns in COLUMNS:
            tmux("resize-window", "-t", "view", "-x", str(columns), "-y", "14")
            found[columns] = settled()
        yield found
    finally:
        tmux("kill-server")


@pytest.mark.parametrize("columns", COLUMNS)
def test_the_live_view_shows_every_figure_once_at(columns: int, screens: dict[int, str]) -> None:
    assert counts(screens[columns]) == EACH_ONCE
    assert max(map(len, Text.from_ansi(screens[columns]).plain.splitlines())) <= columns


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
@pytest.mark.heavy
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_pictures_of_terminal_and_report_have_the_size_and_the_colours_of(
    columns: int,
    scheme: str,
    screens: dict[int, str],
    pictures: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pictures, "PICTURES", tmp_path)
    pictures.draw_terminal(screens[columns], columns, scheme)
    report = tmp_path / f"report_{columns}_{scheme}.png"
    page = RunReport(RunFolder(make_run(tmp_path))).write()
    pictures.browse(page, report, pictures.COLUMN_PX * columns, pictures.REPORT_PX, scheme)
    for path in (tmp_path / f"terminal_{columns}_{scheme}.png", report):
        with Image.open(path) as picture:
            grey = picture.convert("L")
        assert abs(grey.width - pictures.COLUMN_PX * columns) <= 2 * pictures.MARGIN_PX
        background = grey.getpixel((1, 1))
        assert isinstance(background, int)
        assert (background > 200) if scheme == "light" else (background < 60)
        pixels = grey.histogram()
        readable = sum(pixels[:110]) if scheme == "light" else sum(pixels[150:])
        assert readable > 0.002 * grey.width * grey.height, "the text stands out"
