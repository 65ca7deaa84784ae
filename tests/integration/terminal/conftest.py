"""A tiny model folder, and an OpenAI endpoint that answers by a script."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tailrace.toolbox.byte_tokenizer import build_byte_tokenizer
from tailrace_cli.__main__ import app
from tests.world.json_server import json_server

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"

Play = Callable[..., str]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same random weights over bytes in each run of the tests, as `save_pretrained` writes them."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = build_byte_tokenizer(tmp_path_factory.mktemp("model"))
    config = Qwen3Config(
        vocab_size=262,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Play:
    """`tailrace episode` in this process; what it printed, without line breaks."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    capfd.readouterr()

    def played(example: str, *arguments: str, exit_code: int = 0) -> str:
        words = ["episode", str(EXAMPLES / example), *arguments]
        assert app(words, standalone_mode=False) == exit_code
        out, err = capfd.readouterr()
        assert "it/s" not in err, "a progress bar"
        return " ".join(out.split())

    return played


@dataclass
class ScriptedEndpoint:
    """Answers call after call with the next message of `script`; the last one goes on for ever."""

    url: str = ""
    script: list[dict[str, Any]] = field(default_factory=lambda: [{"content": "7"}])
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    status: int = 200

    def answer(self, path: str, key: str, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and body of the answer to a chat completion."""
        self.keys.append(key)
        self.requests.append(request)
        number = len(self.requests)
        said = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        reason = "tool_calls" if said.get("tool_calls") else "stop"
        body = {
            "id": f"chatcmpl-{number}",
            "object": "chat.completion",
            "created": 0,
            "model": request["model"],
            "choices": [
                {"index": 0, "finish_reason": reason, "message": {"role": "assistant", **said}}
            ],
            "usage": {
                "prompt_tokens": 20 + number,
                "completion_tokens": 3,
                "total_tokens": 23 + number,
            },
        }
        path = urlsplit(path).path  # a proxy is asked for whole URLs
        return (self.status if path == "/v1/chat/completions" else 404), body


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    scripted = ScriptedEndpoint()
    with json_server(scripted.answer) as url:
        scripted.url = f"{url}/v1"
        yield scripted
