"""`tailrace up examples/sandbox`, and its tools as its page calls them."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, TAILRACE, environment

EXAMPLE = ROOT / "examples" / "sandbox"
DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Directory of a run whose services are up."""
    folder = tmp_path_factory.mktemp("sandbox")
    argv = [TAILRACE, "up", str(EXAMPLE), f"output_dir={folder}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=environment(), cwd=folder)
    deadline_s = time.monotonic() + DEADLINE_S
    try:
        while len(served(folder / "sandbox")) < 2:
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline_s, (folder / "log").read_text()
            time.sleep(0.5)
        yield folder / "sandbox"
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()  # where it has not ended; its guardian ends the rest


def tools(run_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [TAILRACE, "tools", *words, "--run-dir", str(run_dir)]
    return subprocess.run(argv, env=environment(), capture_output=True, text=True, check=False)


def served(run_dir: Path) -> set[str]:
    """Workers of the tool `shell`."""
    listed = [json.loads(line) for line in tools(run_dir, "ls", "--json").stdout.splitlines()]
    return {each["worker_id"] for tool in listed if tool["name"] == "shell" for each in tool["workers"]}


def test_calls_of_the_page_do_what_it_says(run_dir: Path) -> None:
    lines = (EXAMPLE / "README.md").read_text().splitlines()
    calls = [shlex.split(line)[2:-2] for line in lines if line.startswith("tailrace tools call")]
    program, loop = (tools(run_dir, *words) for words in calls[:2])
    assert program.stdout == "338350\n"
    assert loop.returncode == 1
    assert "1\n2\n3" in loop.stderr
    assert "[ended because it took longer than 5 s]" in loop.stderr


def test_a_plot_makes_no_warning(run_dir: Path) -> None:
    known = "import importlib.util as u; print(u.find_spec('matplotlib') is not None)"
    if tools(run_dir, "call", "python", json.dumps({"code": known})).stdout != "True\n":
        pytest.skip("the interpreter of tool code has no matplotlib")
    code = "import matplotlib.pyplot as p; p.plot([1, 3, 2]); p.savefig('p.png'); print('drawn')"
    done = tools(run_dir, "call", "python", json.dumps({"code": code, "outputs": ["p.png"]}))
    found = json.loads(done.stdout or done.stderr)
    assert (found["stdout"], found["stderr"], found["notes"]) == ("drawn\n", "", [])
    assert set(found["files"]["p.png"]) == {"base64"}
