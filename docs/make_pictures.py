"""Makes docs/pictures: the live view of a real run in tmux and its report in a browser, at 80 and 160
columns, light and dark. Needs tmux and chromium: python docs/make_pictures.py [FOLDER OF THE RUN]
"""

import io
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
EXPERIMENT = ROOT / "examples" / "frozen_lake"
SHOWN_FROM_STEP = {160: 25, 80: 45}  # by columns: the terminal is made narrower while the run goes on
ROWS = 14
COLUMN_PX, ROW_PX, MARGIN_PX, REPORT_PX = 8, 19, 16, 1500
COLOURS = 128  # of a picture, to keep it small
WINDOW_PX = 200  # more than the parts of a browser window that are no page
TIMEOUT_S = 1800.0

_COLOURS = {
    "light": [(29, 33, 38), (179, 38, 30), (23, 114, 69), (138, 90, 0), (47, 111, 196), (154, 63, 174),
              (20, 135, 106), (93, 104, 114)],
    "dark": [(152, 164, 174), (255, 138, 128), (91, 201, 141), (230, 184, 92), (110, 168, 245),
             (207, 139, 224), (76, 199, 160), (227, 232, 236)],
}  # fmt: skip
THEMES = {
    "light": TerminalTheme((255, 255, 255), (29, 33, 38), _COLOURS["light"]),
    "dark": TerminalTheme((20, 24, 28), (227, 232, 236), _COLOURS["dark"]),
}
_PAGE = """<!doctype html><meta charset="utf-8"><style>
{stylesheet}
body {{ color: {foreground}; background: {background}; margin: 16px; }}
pre {{ font: 13.28px/19px "DejaVu Sans Mono", monospace; margin: 0; }}
</style><pre>{code}</pre>"""


def tmux(*arguments: str) -> str:
    """Output of a tmux command, on a server of its own."""
    command = ["tmux", "-L", "tailrace-pictures", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def wait_for_step(step: int, deadline_s: float) -> None:
    """Wait until the live view shows a step of training."""
    while True:
        screen = tmux("capture-pane", "-p", "-t", "run")
        shown = screen.partition("training  step ")[2].partition("/")[0]
        if shown.isdigit() and int(shown) >= step:
            return
        if time.monotonic() > deadline_s or "error" in screen:
            raise RuntimeError(f"no step {step} in the live view:\n{screen}")
        time.sleep(0.2)


def capture(run_dir: Path) -> dict[int, str]:
    """Screens of a run by columns, with colours; returns when the run has ended."""
    words = [str(Path(sys.executable).parent / "tailrace"), "train", str(EXPERIMENT), "--overwrite"]
    words += [
        "max_steps=60",
        "eval_steps=20",
        f"exp_name={run_dir.name}",
        f"output_dir={run_dir.parent.name}",
    ]
    deadline_s, screens = time.monotonic() + TIMEOUT_S, {}
    tmux(
        "new-session",
        "-d",
        "-s",
        "run",
        "-x",
        "160",
        "-y",
        str(ROWS),
        "-c",
        str(run_dir.parents[1]),
        *words,
    )
    try:
        for columns, step in SHOWN_FROM_STEP.items():
            tmux("resize-window", "-t", "run", "-x", str(columns), "-y", str(ROWS))
            screen = ""
            while "tokens/s" not in screen:  # a redraw may be under way
                wait_for_step(step, deadline_s)
                screen = tmux("capture-pane", "-e", "-p", "-t", "run").strip("\n")
            screens[columns] = screen
        while subprocess.run(
            ["tmux", "-L", "tailrace-pictures", "has-session"], check=False, capture_output=True
        ).returncode == 0:  # fmt: skip
            if time.monotonic() > deadline_s:
                raise RuntimeError("the run does not end")
            time.sleep(0.5)
    finally:
        subprocess.run(
            ["tmux", "-L", "tailrace-pictures", "kill-server"], check=False, capture_output=True
        )
    return screens


def browse(page: Path, picture: Path, width: int, height: int, scheme: str) -> None:
    """Save the picture of a page in a browser window of this size and colour scheme."""
    with tempfile.TemporaryDirectory() as profile:
        options = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={profile}", f"--window-size={width},{height + WINDOW_PX}",
            "--virtual-time-budget=3000", f"--screenshot={picture}",
            f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
        ]  # fmt: skip
        command = ["chromium", *options, f"file://{page.absolute()}"]
        subprocess.run(command, check=True, capture_output=True)
    with Image.open(picture) as taken:
        page_alone = taken.convert("RGB").crop((0, 0, width, height))
    page_alone.quantize(COLOURS).save(picture, optimize=True)


def draw_terminal(screen: str, columns: int, scheme: str) -> None:
    """Save the picture of a terminal's screen."""
    console = Console(width=columns, record=True, file=io.StringIO(), markup=False)
    console.print(Text.from_ansi(screen), no_wrap=True)
    with tempfile.NamedTemporaryFile("w", suffix=".html") as page:
        page.write(console.export_html(theme=THEMES[scheme], code_format=_PAGE))
        page.flush()
        picture = PICTURES / f"terminal_{columns}_{scheme}.png"
        width = COLUMN_PX * columns + 2 * MARGIN_PX
        height = ROW_PX * len(screen.splitlines()) + 2 * MARGIN_PX
        browse(Path(page.name), picture, width, height, scheme)


def main() -> None:
    """Make all pictures."""
    own = "/tmp/tailrace/runs/lake"  # the pictures show the path
    run_dir = Path(sys.argv[1] if len(sys.argv) > 1 else own).absolute()
    run_dir.parents[1].mkdir(parents=True, exist_ok=True)
    PICTURES.mkdir(exist_ok=True)
    for columns, screen in capture(run_dir).items():
        for scheme in THEMES:
            draw_terminal(screen, columns, scheme)
            picture = PICTURES / f"report_{columns}_{scheme}.png"
            browse(run_dir / "report.html", picture, COLUMN_PX * columns, REPORT_PX, scheme)


if __name__ == "__main__":
    main()
