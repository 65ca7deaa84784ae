"""Texts of models, tools, logs and files reach terminal and report without any power over them."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from tailrace_agents.adapters.kept_episodes import KeptEpisode
from tailrace_cli.__main__ import app
from tailrace_cli.commands.runs import runs_table
from tailrace_cli.commands.tools import console as tools_console
from tailrace_cli.console import plain_console
from tailrace_cli.live_view import ProgressView
from tailrace_cli.reporting.pages import RunReport, write_comparison
from tailrace_cli.run_folders import RunFolder
from tailrace_cli.terminal.screen import Screen
from tailrace_protos.chat import ChatMessage, ToolCall
from tailrace_protos.episode import Outcome
from tailrace_protos.event import EvaluationFinished, RunFailed
from tailrace_protos.tool import ToolResult
from tests.unit.tailrace_cli.test_failures_shown import status
from tests.unit.tailrace_cli.test_report import BODIES, lines, make_run
from tests.unit.tailrace_cli.test_runs import STARTED
from tests.unit.tailrace_cli.test_runs import make_run as make_small_run

TERMINAL = {
    "clears the screen": "\x1b[2J\x1b[H",
    "changes the title": "\x1b]0;rm -rf\x07",
    "writes to the clipboard": "\x1b]52;c;cm0gLXJm\x07",
    "a link to elsewhere": "\x1b]8;;https://evil.example\x1b\\here\x1b]8;;\x1b\\",
    "eight-bit sequence": "\x9b31m\x9d0;x\x9c",
    "goes back and overwrites": "failed\x08\x08\x08\x08\x08\x08passed\rall well",
    "turns the direction": "\u202egnp.exe\u2066\u200f",
    "string that never ends": "\x1bP\x1b_\x1b^",
}
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def on_the_live_view(text: str, console: Console) -> None:
    with ProgressView(console, "lake") as view:
        view.update(status(num_failures=1, newest_failure=text, hints=(text,)))


def at_the_end_of_a_run(text: str, console: Console) -> None:
    ProgressView(console, "lake").update(status(failed=RunFailed("x", 1, text, "agents")))


def as_an_episode(text: str, console: Console) -> None:
    screen = Screen(console)
    screen.on_reset(text)
    screen.on_turn(text, text, 1.0, True)
    screen.on_tool(ToolCall("1", text, text), ToolResult("1", text, content=text), False)
    screen.line(text)


def as_the_name_of_a_run(text: str, console: Console) -> None:
    console.print(runs_table([RunFolder(Path("runs") / text.replace("/", ""))]))


def as_an_error(text: str, console: Console) -> None:
    console.print(f"error: {text}", style="red", soft_wrap=True)


PLACES = (on_the_live_view, at_the_end_of_a_run, as_an_episode, as_the_name_of_a_run, as_an_error)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("text", TERMINAL.values(), ids=TERMINAL)
def test_no_text_commands_the_terminal(text: str, place: Callable[[str, Console], None]) -> None:
    output = io.StringIO()
    place(text, plain_console(file=output, width=100, color_system=None))
    assert output.getvalue().strip()
    assert not CONTROL.search(output.getvalue())


def test_the_terminals_own_commands_still_reach_it() -> None:
    output = io.StringIO()
    console = plain_console(file=output, force_terminal=True, color_system="standard", width=100)
    console.print("red\x1b[2J", style="red")
    console.show_cursor(False)
    assert output.getvalue().startswith("\x1b[31mred\u241b[2J\x1b[0m")
    assert "\x1b[?25l" in output.getvalue()


@pytest.mark.parametrize("text", TERMINAL.values(), ids=TERMINAL)
def test_lines_of_logs_command_nothing(tmp_path: Path, text: str) -> None:
    folder = make_small_run(tmp_path, STARTED)
    log = [json.dumps({"event": text, "timestamp": "2026-01-01T00:00:00Z", "reason": text}), text]
    (folder / "logs" / "agents.log").write_text("\n".join(log))
    printed = CliRunner().invoke(app, ["logs", str(folder)], catch_exceptions=False).output
    assert "reason=" in printed
    assert not CONTROL.search(printed)


def test_a_tool_is_listed_by_the_same_console() -> None:
    assert type(tools_console) is type(plain_console())


MARKUP = {
    "a script": "</script><script>alert(1)</script>",
    "an attribute": '"><img src=x onerror=alert(1)>',
    "the end of a preformatted text": "</pre></div><iframe srcdoc='<b>'></iframe>",
    "the end of the style": "</style><style>*{display:none}</style>",
    "a template": "{{ 7 * 7 }}{% raw %}<% 1 %>${1}",
    "a comment": "<!--<script>--><svg/onload=alert(1)>",
    "a link": "<a href=javascript:alert(1)>figures</a><base href=//evil.example>",
    "a refresh": '<meta http-equiv=refresh content="0;url=//evil.example"><form action=//evil.example>',
    "letters of other kinds": "\u2028\u2029\ufeff\x00\ud83d\ude00",
}


class _Tags(HTMLParser):
    """Elements of a page with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(name for name, _ in attrs)))


def file_name(text: str) -> str:
    return re.sub("[/\x00]", "", text)


def hostile_run(root: Path, text: str) -> Path:
    """A run in which everything that others write is `text`."""
    folder = make_run(root, file_name(text))
    told = ChatMessage("assistant", text, (ToolCall("1", text, text),), reasoning=text)
    answer = msgspec.structs.replace(ChatMessage("tool", text), name=text)
    episode = KeptEpisode(
        text, "e2-v3.0", text, 1, False, Outcome.OK, text, 1.0, 1.0, {}, (1.0,), (told, answer)
    )
    (folder / "episodes" / "agents.jsonl").write_bytes(msgspec.json.encode(episode) + b"\n")
    (folder / "events.jsonl").write_bytes(
        lines(*BODIES, EvaluationFinished("e2-v3", 2, 0.5, 0.5, 1, 1), RunFailed(text, 2, text, text))
    )
    rows = [
        {
            "step": step,
            "time_s": 1.0 * step,
            f"tag/{text}/reward_mean": 0.5,
            "reward_mean": 0.1,
            text: 1,
        }
        for step in range(3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(yaml.safe_dump({"exp_name": text, text: text}))
    launch = {key: text for key in ("command", "folder", "commit", "machine")}
    (folder / "launch.json").write_text(json.dumps([{"unix_s": 0, **launch, "versions": {text: text}}]))
    (folder / "renders").mkdir()
    (folder / "renders" / f"{file_name(text)}.gif").write_bytes(b"GIF89a")
    return folder


@pytest.mark.parametrize("text", MARKUP.values(), ids=MARKUP)
def test_no_text_adds_an_element_to_a_report(tmp_path: Path, text: str) -> None:
    text = text.encode("utf-16", "surrogatepass").decode("utf-16")
    hostile = RunFolder(hostile_run(tmp_path / "hostile", text))
    harmless = RunFolder(hostile_run(tmp_path / "harmless", "words"))
    pages = [_Tags(RunReport(run).write().read_text()).elements for run in (hostile, harmless)]
    assert pages[0] == pages[1]
    other = RunFolder(make_run(tmp_path, "other"))
    compared = [
        _Tags(write_comparison([run, other], tmp_path / "c.html").read_text()).elements
        for run in (hostile, harmless)
    ]
    assert compared[0] == compared[1]
