"""Traces of episodes in MLflow, by the real package on SQLite; `make test-trackers`."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.world.otlp import otlp_receiver
from tests.world.servers import free_port

pytestmark = pytest.mark.skipif(
    find_spec("mlflow") is None, reason="make test-trackers installs it in an environment of its own"
)

PATIENT = """
from tailrace_agents.adapters import mlflow_traces
mlflow_traces._CLOSE_S = 120.0  # a busy machine writes the first trace slowly
"""

EPISODE = """
import sys
from tailrace import tracing
from tailrace.config import RunConfig, TracingArgs
from tailrace_agents.adapters.mlflow_traces import EpisodeTraces
from tailrace_protos.chat import ChatMessage, ToolCall
run = RunConfig(exp_name="unit", tracing=TracingArgs(mlflow=sys.argv[1], sample_rate=1.0))
tracing.configure(run, "agents", "a1")
tracing.add_sink(EpisodeTraces(run).sink())
messages = [
    ChatMessage("user", "6*7?"),
    ChatMessage("assistant", tool_calls=(ToolCall("c1", "calculator", '{"a": 6}'),)),
    ChatMessage("tool", "42", tool_call_id="c1", name="calculator"),
    ChatMessage("assistant", "It is 42."),
]
with tracing.span("play", tracing.episode("t1.0"), episode_id="t1.0") as played:
    for turn in (0, 1):
        with tracing.span("turn", turn=turn, num_prompt_tokens=10 + turn) as made:
            made.set(num_sampled_tokens=5)
        if turn == 0:
            with tracing.span("tool calculator", tool="calculator", arguments='{"a": 6}') as made:
                made.set(result="42", is_error=False)
    played.set(outcome="ok", group_id="t1", phase="train", tag="sums", reward=1.0,
               num_prompt_tokens=11, num_sampled_tokens=10, messages=messages)
with tracing.span("play", tracing.episode("t1.1"), episode_id="t1.1"):
    pass  # handed back: no trace
tracing.close()
"""

MANY = """
import sys
from prometheus_client import REGISTRY
from tailrace import tracing
from tailrace.config import RunConfig, TracingArgs
from tailrace_agents.adapters.mlflow_traces import EpisodeTraces
from tailrace_protos.chat import ChatMessage
args = TracingArgs(mlflow=sys.argv[1], sample_rate=1.0, mlflow_per_minute=1)
run = RunConfig(exp_name="unit", tracing=args)
tracing.configure(run, "agents", "a1")
tracing.add_sink(EpisodeTraces(run).sink())
for number in range(40):
    with tracing.span("play", tracing.episode(f"t{number}.0")) as played:
        played.set(outcome="ok", group_id="t", phase="train", tag="sums", reward=1.0,
                   messages=[ChatMessage("user", "6*7?")])
tracing.close()
for result in ("sent", "dropped"):
    labels = {"receiver": "mlflow", "result": result}
    print(int(REGISTRY.get_sample_value("tailrace_tracing_spans_total", labels)))
"""

OPEN = """
import sys
from tailrace.config import RunConfig, TracingArgs
from tailrace_agents.adapters.mlflow_traces import EpisodeTraces
EpisodeTraces(RunConfig(exp_name="unit", tracing=TracingArgs(mlflow=sys.argv[1])))
"""

READ = """
import json, sys, mlflow
mlflow.set_tracking_uri(sys.argv[1])
experiment = mlflow.get_experiment_by_name("unit").experiment_id
traces = mlflow.search_traces(locations=[experiment], return_type="list")
print(json.dumps([trace.to_dict() for trace in traces], default=str))
"""


def run(code: str, uri: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", code, uri], check=False, timeout=200, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert "spans not" not in ended.stderr, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    uri = f"sqlite:///{Path(tmp_path_factory.mktemp('mlflow')) / 'new' / 'mlflow.db'}"
    run(PATIENT + EPISODE, uri)
    found: list[dict[str, Any]] = json.loads(run(READ, uri).splitlines()[-1])
    return found


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {key: json.loads(value) for key, value in span["attributes"].items()}


def test_an_episode_is_one_trace_with_its_messages_and_reward(traces: list[dict[str, Any]]) -> None:
    (trace,) = traces
    root = next(span for span in trace["data"]["spans"] if not span.get("parent_span_id"))
    known = attributes(root)
    assert known["mlflow.spanInputs"]["messages"] == [{"role": "user", "content": "6*7?"}]
    replies = known["mlflow.spanOutputs"]["messages"]
    assert [each["role"] for each in replies] == ["assistant", "tool", "assistant"]
    assert replies[0]["tool_calls"][0]["name"] == "calculator"
    assert known["mlflow.spanOutputs"]["reward"] == 1.0
    assert trace["info"]["tags"]["outcome"] == "ok"
    (feedback,) = trace["info"]["assessments"]
    assert (feedback["assessment_name"], feedback["feedback"]["value"]) == ("reward", 1.0)


def test_turns_and_tool_calls_are_spans_with_tokens_and_results(traces: list[dict[str, Any]]) -> None:
    spans = {span["name"]: attributes(span) for span in traces[0]["data"]["spans"]}
    assert spans.keys() == {"episode", "turn", "tool calculator"}
    last_turn = spans["turn"]
    assert last_turn["mlflow.chat.tokenUsage"] == {
        "input_tokens": 11,
        "output_tokens": 5,
        "total_tokens": 16,
    }
    new = [message["content"] for message in last_turn["mlflow.spanInputs"]["messages"]]
    assert new == ["42"], "those before are in the turns before and in the episode"
    assert last_turn["mlflow.spanOutputs"]["messages"] == [
        {"role": "assistant", "content": "It is 42."}
    ]
    assert spans["tool calculator"]["mlflow.spanOutputs"] == "42"


def test_spans_are_in_their_places_and_times(traces: list[dict[str, Any]]) -> None:
    (root,) = (each for each in traces[0]["data"]["spans"] if not each["parent_span_id"])
    others = [each for each in traces[0]["data"]["spans"] if each["parent_span_id"]]
    assert {each["parent_span_id"] for each in others} == {root["span_id"]}
    for each in others:
        assert root["start_time_unix_nano"] <= each["start_time_unix_nano"]
        assert each["end_time_unix_nano"] <= root["end_time_unix_nano"]
    info = traces[0]["info"]
    assert info["state"] == "OK"
    assert (info["request_preview"], info["response_preview"]) == ("6*7?", "It is 42.")


def test_mlflow_has_the_traces_beside_an_otlp_receiver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    with otlp_receiver() as receiver, monkeypatch.context() as patched:
        patched.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)  # as `tailrace train` sets it
        run(PATIENT + EPISODE, uri)
    assert {span.name for span in receiver.spans} == {"play", "turn", "tool calculator"}
    assert len(json.loads(run(READ, uri).splitlines()[-1])) == 1


def test_traces_beyond_those_of_a_minute_are_left_out_and_counted(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    shown = run(PATIENT + MANY, uri)
    assert shown.count("raise tracing.mlflow_per_minute") == 1  # told once
    sent, dropped = map(int, shown.splitlines()[-2:])
    assert 1 <= sent <= 9  # a few at once
    assert sent + dropped == 40
    assert len(json.loads(run(READ, uri).splitlines()[-1])) == sent


def test_a_server_that_is_gone_is_in_the_log_before_the_end_of_the_run() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", EPISODE, f"http://127.0.0.1:{free_port()}"],
        check=False, timeout=200, capture_output=True, text=True,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert "spans not taken" in shown.stdout
    assert "check tracing.mlflow" in shown.stdout


def test_workers_that_start_together_make_one_database(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'new' / 'mlflow.db'}"
    workers = [
        subprocess.Popen([sys.executable, "-c", OPEN, uri], stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    ended = [(worker.communicate(timeout=300)[1], worker.returncode) for worker in workers]
    assert [code for _, code in ended] == [0, 0, 0], ended


def test_a_file_that_is_no_database_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("notes " * 1000)
    shown = subprocess.run(
        [sys.executable, "-c", OPEN, f"sqlite:///{tmp_path / 'mlflow.db'}"],
        check=False, timeout=200, capture_output=True, text=True,
    )  # fmt: skip
    assert "ConfigError: tracing.mlflow: cannot use sqlite:///" in shown.stderr
