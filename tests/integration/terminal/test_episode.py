"""`tailrace episode` for every kind of player, with a model folder and with an endpoint."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest

from tests.integration.terminal.conftest import Play, ScriptedEndpoint

CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "calculator", "arguments": '{"expression": "6*7"}'},
}


def test_an_environment_is_played_turn_by_turn_by_a_model_folder(play: Play, checkpoint: Path) -> None:
    shown = play(
        "frozen_lake", "agents.max_episode_tokens=1024", "inference.max_model_len=1024",
        "--checkpoint", str(checkpoint), "--task-seed", "3",
    )  # fmt: skip
    assert "task 3 of held_out_lake" in shown
    assert "model, turn 1 " in shown
    assert re.search(r"environment, reward \S+ .*outcome ok, return \S+, \d+ turns", shown)
    assert re.search(r"reward 0 \(success 0\)", shown)
    assert re.search(r"row 1 of 1: \d+ tokens, \d+ of them sampled at mean log-probability -", shown)


def test_an_agent_loop_shows_its_prompt_its_tokens_and_its_reward(play: Play, checkpoint: Path) -> None:
    shown = play(
        "calculator", "agents.max_episode_tokens=1024", "inference.max_model_len=1024",
        "--checkpoint", str(checkpoint), "--tag", "sums",
    )  # fmt: skip
    assert "What is " in shown
    counts = re.search(r"turn 1: (\d+) tokens in \(\1 new\), (\d+) out, (stop|length)", shown)
    assert counts, shown
    assert f"{counts[2]} of them sampled" in shown
    assert "reward 0 (success 0)" in shown


def test_a_workflow_calls_a_gateway_of_its_own_and_every_call_is_shown(
    play: Play, checkpoint: Path
) -> None:
    shown = play("frameworks/openai_sdk", "--checkpoint", str(checkpoint), "--task-seed", "2")
    assert "A number near 20, please." in shown
    assert re.search(r"turn 1: \d+ new tokens in, \d+ out", shown)
    assert re.search(r"turn 2: \d+ new tokens in, \d+ out", shown)
    assert re.search(r"outcome ok, return \S+, 2 turns", shown), shown
    assert re.search(r"row 1 of \d: \d+ tokens", shown)


def test_no_proxy_stands_between_a_workflow_and_the_gateway_of_the_command(
    play: Play, endpoint: ScriptedEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a client of an SDK does, urllib takes the way that the environment names."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(urllib.request, "_opener", None)  # it keeps the proxies of its first call
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    (tmp_path / "plain_agent.py").write_text(PLAIN_AGENT)
    path = tmp_path / "experiment.yaml"
    path.write_text(PLAIN_EXPERIMENT)
    shown = play(str(path), "--endpoint", endpoint.url, "--model", "m")
    assert "outcome ok, return 1" in shown, shown


def test_a_workflow_that_leaves_before_the_end_of_an_answer_has_made_its_call(
    play: Play, endpoint: ScriptedEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent reads the status only; 16 MB fit into no buffer in between; the rest meets nobody."""
    monkeypatch.setattr(urllib.request, "_opener", None)
    endpoint.script = [{"content": "7", "ignored": " " * (16 << 20)}]
    (tmp_path / "plain_agent.py").write_text(PLAIN_AGENT)
    path = tmp_path / "experiment.yaml"
    path.write_text(PLAIN_EXPERIMENT)
    shown = play(str(path), "--endpoint", endpoint.url, "--model", "m")
    assert "outcome ok, return 1, 1 turns" in shown, shown[-500:]
    assert "ConnectionReset" not in shown


def test_an_endpoint_plays_an_agent_loop_with_tools(
    play: Play, endpoint: ScriptedEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    endpoint.script = [{"content": None, "tool_calls": [CALL]}, {"content": "forty-two"}]
    shown = play("calculator", "--endpoint", endpoint.url, "--model", "some-model")
    assert "turn 1: 21 tokens in, 3 out, stop" in shown
    assert '-> calculator({"expression": "6*7"})' in shown
    assert re.search(r"tool calculator, \d+ ms \S+ │ 42 │", shown)
    assert "turn 2: 22 tokens in, 3 out, stop" in shown
    assert "reward 0 (success 0)" in shown
    first, second = endpoint.requests
    assert first["model"] == "some-model"
    assert [tool["function"]["name"] for tool in first["tools"]] == ["calculator"]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool"]
    assert second["messages"][-1]["content"] == "42"
    assert set(endpoint.keys) == {"Bearer a-key"}


def test_an_endpoint_that_calls_tools_for_ever_fails_at_the_limit(
    play: Play, endpoint: ScriptedEndpoint
) -> None:
    endpoint.script = [{"content": None, "tool_calls": [CALL]}]
    shown = play(
        "calculator", "agents.loop_args.max_turns=2", "--endpoint", endpoint.url, "--model", "m"
    )
    assert len(endpoint.requests) == 2
    assert re.search(r"outcome policy_failure \(.*max_turns", shown), shown


def test_an_endpoint_plays_an_environment(play: Play, endpoint: ScriptedEndpoint) -> None:
    shown = play("frozen_lake", "--endpoint", endpoint.url, "--model", "m", "--task-seed", "3")
    assert "Invalid action." in shown
    assert re.search(r"outcome \w+.*10 turns", shown), shown
    assert len(endpoint.requests) == 10


def test_an_endpoint_plays_a_workflow_and_every_call_is_shown(
    play: Play, endpoint: ScriptedEndpoint
) -> None:
    shown = play("frameworks/openai_sdk", "--endpoint", endpoint.url, "--model", "some-model")
    assert "A number near 00, please." in shown
    assert "turn 2: 22 tokens in, 3 out" in shown
    assert re.search(r"outcome ok, return 2, 2 turns", shown), shown
    assert [request["model"] for request in endpoint.requests] == ["some-model"] * 2


def test_an_endpoint_that_refuses_is_named(play: Play, endpoint: ScriptedEndpoint) -> None:
    endpoint.status = 503
    shown = play("calculator", "--endpoint", endpoint.url, "--model", "m", exit_code=1)
    assert "outcome infra_failure" in shown
    assert "answered 503" in shown


EDITOR = '''
from tailrace.sdk import AgentLoop
from tailrace_protos.chat import ChatMessage


class Editor(AgentLoop):
    """Asks, changes what it asked, and asks again."""

    async def run(self, row, policy):
        first = ChatMessage("user", row["prompt"])
        reply = (await policy.complete([first], max_new_tokens=8)).message
        await policy.chat([ChatMessage("user", "Something else."), reply, ChatMessage("user", "So?")])
        return policy.finish()
'''


@pytest.mark.parametrize("example", ["calculator", "frameworks/openai_sdk"])
def test_an_endpoint_elsewhere_is_reached_by_the_proxy_that_the_environment_names(
    example: str, play: Play, endpoint: ScriptedEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", endpoint.url.removesuffix("/v1"))
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    shown = play(example, "--endpoint", "http://models.example/v1", "--model", "m")
    assert "outcome ok" in shown, shown
    assert endpoint.requests


PLAIN_AGENT = """
import asyncio
import json
import urllib.request


def post(base_url, api_key):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "How many?"}]}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return answer.status


def rows(split):
    return [{"prompt": "How many?"}]


class PlainAgent:
    async def run(self, data, *, base_url, api_key):
        return float(await asyncio.to_thread(post, base_url, api_key) == 200)
"""
PLAIN_EXPERIMENT = """
exp_name: plain
pretrain: none
scheduler: {tags: [questions]}
agents:
  workflow: {agent: plain_agent.PlainAgent}
  datasets: {questions: {path: "plain_agent:rows"}}
  max_episode_tokens: 1024
  generating_args: {max_new_tokens: 64}
  eval_generating_args: {max_new_tokens: 64}
inference: {device: cpu, max_model_len: 1024}
"""
EXPERIMENT = """
exp_name: editor
pretrain: CHECKPOINT
scheduler: {tags: [questions]}
agents:
  agent_loops: {editor: "an_editor:Editor"}
  datasets: {questions: {path: QUESTIONS, agent_name: editor}}
  max_episode_tokens: 1024
  generating_args: {max_new_tokens: 64}
  eval_generating_args: {max_new_tokens: 64}
  loop_args: {max_turns: 4}
inference: {device: cpu, max_model_len: 1024}
"""


@pytest.mark.parametrize("place", ["checkpoint", "endpoint"])
def test_a_conversation_that_was_changed_shows_where_it_forked(
    play: Play, checkpoint: Path, endpoint: ScriptedEndpoint, tmp_path: Path, place: str
) -> None:
    (tmp_path / "an_editor.py").write_text(EDITOR)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "First things first?"}\n')
    path = tmp_path / "experiment.yaml"
    content = EXPERIMENT.replace("QUESTIONS", str(tmp_path / "rows.jsonl"))
    path.write_text(content.replace("CHECKPOINT", str(checkpoint)))
    source = {
        "checkpoint": ("--checkpoint", str(checkpoint)),
        "endpoint": ("--endpoint", endpoint.url, "--model", "m"),
    }[place]
    shown = play(str(path), *source)
    before, fork, after = shown.partition(
        "the prefix forked" if place == "checkpoint" else "another conversation"
    )
    assert fork, shown
    assert "First things first?" in before
    assert "turn 2:" in after
