"""`tailrace doctor --engine`: a tiny model in a real engine, and engines that lie."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tailrace.config import ConfigError
from tailrace_cli.commands.doctor_engine import _run, doctor_engine
from tests.contract.engine.harness import make_card, make_model

WRONG_ENGINE = """
from tailrace_inference.engine import row_sampler
from tailrace_inference.engine.driver import torch_engine

def cold_engine(card, config):
    '''The torch engine at half of the temperature that requests ask for.'''
    scaled = row_sampler.scaled_logprobs
    row_sampler.scaled_logprobs = lambda logits, rows: scaled(logits * 2.0, rows)
    return torch_engine(card, config)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("model")
    make_model(0).save_pretrained(made)
    for name, content in make_card().tokenizer_files.items():
        (made / name).write_bytes(content)
    return made


def report(*arguments: Any) -> tuple[int, dict[str, str]]:
    """The exit code, and the mark of each line by its beginning."""
    shown = io.StringIO()
    code = doctor_engine(Console(file=shown, width=300), *arguments)
    lines = [line.split(None, 1) for line in shown.getvalue().splitlines()[1:]]
    return code, {rest: mark for mark, rest in lines}


@pytest.mark.parametrize("engine", ["torch", "hf"])
def test_an_engine_that_does_right_passes_every_check(folder: Path, engine: str) -> None:
    code, lines = report(engine, str(folder), "")
    assert (code, set(lines.values())) == (0, {"ok"})
    checked = " ".join(lines)
    (judged,) = (line for line in lines if line.startswith("log-probabilities"))
    divergence = re.search(r", KL (\S+), correlation (\S+) \((\d+) tokens\)", judged)
    assert divergence is not None, judged
    assert 0 <= float(divergence[1]) < 1e-6
    assert float(divergence[2]) > 0.9999
    for what in ("log-probabilities", "weight swap", "incomplete update", "abort", "tokens/s, 16"):
        assert what in checked
    assert ("prefix reuse" in checked) is (engine == "torch")


def test_an_engine_with_wrong_log_probabilities_fails_the_report(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lying.py").write_text(WRONG_ENGINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, lines = report("lying:cold_engine", str(folder), "")
    assert code == 1
    failed = [what for what, mark in lines.items() if mark == "FAILED"]
    assert any(what.startswith("log-probabilities") for what in failed)


@pytest.mark.parametrize(
    ("engine", "model", "arguments", "words"),
    [
        ("torch", "", "", "--model"),
        ("torch", "/nowhere", "", "no model directory"),
        ("torch", None, "[1]", "--engine-args"),
        ("torch", None, '{"x": 1}', "takes none: remove x"),
        ("vlm", None, "", "take one of torch"),
    ],
)
def test_mistakes_are_named(
    folder: Path, engine: str, model: str | None, arguments: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        report(engine, str(folder) if model is None else model, arguments)


def test_words_of_an_engine_s_processes_after_the_checks_are_no_checks(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        """echo '[{"what":"start","state":"1.0 s"}]'\n"""
        "echo 'resource_tracker: There appear to be 1 leaked shared_memory objects' >&2\n"
    )
    python.chmod(0o700)
    (check,) = _run(str(python), tmp_path, "vllm", {})
    assert (check.what, check.state, check.reason) == ("start", "1.0 s", "")
