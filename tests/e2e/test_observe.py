"""What one sees of a run: spans of an episode from all services, and metrics by a real Prometheus.

One short run of the calculator; after its first steps the receiver of spans hangs.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.e2e.processes import running
from tests.e2e.runs import ROOT, TAILRACE
from tests.world.otlp import ReceivedSpan, otlp_receiver
from tests.world.prometheus import BINARY, MISSING, Prometheus, prometheus

CHART_FILES = ROOT / "helm" / "tailrace" / "files"
ALERTS = CHART_FILES / "alerts.yaml"
SHORT = (
    "exp_name=observed",
    "max_steps=20",
    "group_size=8",
    "groups_per_step=4",
    "eval_steps=0",
    "save_steps=0",
    "scheduler.eval_groups=4",
    "scheduler.eval_interim_groups=4",
    "learner.warm_start.num_steps=150",
    "+learner.warm_start.options.skill=0.35",
    "+cluster.num_sandboxes=1",
    "+tracing.sample_rate=1",
    "+tracing.messages=true",
)
NAMES = {"episode", "play", "turn", "generate", "train step", "update weights"}
SERVICES = {"scheduler", "agents", "inference", "tools", "reward", "learner", "weight_sync"}

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]  # a whole run in a fixture


class Seen(NamedTuple):
    """All that was seen of the run."""

    exit_code: int
    printed: str
    trace: dict[str, ReceivedSpan]  # the first one with spans of all services, by span id
    dashboards: dict[str, list[str]]  # queries without data, by dashboard
    alerts: dict[str, str]  # health by name
    missing: set[str]  # metrics of alerts without data
    counted: dict[str, float]  # spans by result


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    if BINARY is None:
        pytest.skip(MISSING)
    folder = tmp_path_factory.mktemp("observed")
    targets = folder / "observed" / "state" / "metrics"
    with otlp_receiver() as receiver, prometheus(folder / "prometheus", targets, ALERTS) as server:
        argv = [TAILRACE, "train", str(ROOT / "examples" / "calculator"), f"output_dir={folder}"]
        argv += [*SHORT, f"+tracing.endpoint={receiver.url}"]
        trace: list[ReceivedSpan] = []

        def is_whole() -> bool:
            trace.extend(_whole(receiver.traces()))  # kept: a later span may come before its parent
            return bool(trace)

        with running(argv, folder / "printed.txt") as command:
            command.wait_until(is_whole, 300)
            receiver.hang.set()
            exit_code = command.ends(400)
        rules = server.get("rules")["groups"][0]["rules"]
        yield Seen(
            exit_code,
            command.printed,
            {span.span_id: span for span in trace},
            {path.stem: _without_data(server, path) for path in CHART_FILES.glob("dashboards/*.json")},
            {rule["name"]: rule["health"] for rule in rules},
            {name for name in _names(ALERTS.read_text()) if not server.series(f"count({name})")},
            _spans(server),
        )


def _whole(traces: dict[str, list[ReceivedSpan]]) -> list[ReceivedSpan]:
    """A trace from admission to the servers' new weights, if one has arrived whole; else nothing.

    Services send their spans every 5 s, in no order: also a generation without some of its parts.
    """
    for spans in traces.values():
        services = {span.service.removeprefix("tailrace_") for span in spans}
        names = {span.name for span in spans}
        known = {"", *(span.span_id for span in spans)}
        is_closed = all(span.parent in known for span in spans)
        parts = Counter(span.parent for span in spans)
        is_closed &= all(parts[span.span_id] == 3 for span in spans if span.name == "generate")
        if is_closed and services >= SERVICES and names >= NAMES:
            return list(spans)
    return []


def _queries(path: Path) -> Iterator[str]:
    for panel in json.loads(path.read_text())["panels"]:
        for target in panel["targets"]:
            text = target["expr"].replace("$namespace", ".*").replace("$run", "observed")
            yield text.replace("$__rate_interval", "20s")


def _without_data(server: Prometheus, path: Path) -> list[str]:
    return [query for query in _queries(path) if not server.series(query)]


def _names(text: str) -> set[str]:
    return set(re.findall(r"\btailrace_[a-z0-9_]+", text))


def _spans(server: Prometheus) -> dict[str, float]:
    """Largest count of spans of any service, by result."""
    found = server.series("max by (result) (tailrace_tracing_spans_total)")
    found += server.series(
        'label_replace(max(tailrace_tracing_queued_spans), "result", "queued", "", "")'
    )
    return {
        each["metric"]["result"]: max(float(value) for _, value in each["values"]) for each in found
    }


def test_the_spans_of_an_episode_are_one_tree_over_all_services(seen: Seen) -> None:
    roots = [span for span in seen.trace.values() if not span.parent]
    assert [root.name for root in roots] == ["episode"]
    for span in seen.trace.values():
        assert not span.parent or span.parent in seen.trace, f"{span.name} has an unknown parent"


def test_a_turn_holds_its_generation_from_queue_to_decode(seen: Seen) -> None:
    for generate in (span for span in seen.trace.values() if span.name == "generate"):
        turn, parts = seen.trace[generate.parent], _below(seen, generate)
        assert (turn.name, turn.service) == ("turn", "tailrace_agents")
        assert [part.name for part in parts] == ["queue", "prefill", "decode"]
        assert parts[0].start_ns == generate.start_ns
        assert parts[-1].end_ns == generate.end_ns
        for before, after in pairwise(parts):
            assert before.end_ns == after.start_ns


def test_a_step_and_its_weights_are_below_the_episode_that_was_trained(seen: Seen) -> None:
    (step,) = (span for span in seen.trace.values() if span.name == "train step")
    assert step.links, "the other sampled episodes of the step"
    above = {"update weights": "tailrace_inference", "publish weights": "tailrace_learner"}
    for name, service in above.items():
        found = next(span for span in seen.trace.values() if span.name == name)
        assert found.service == service
        assert step in _ancestors(seen, found)


def test_spans_have_messages_tokens_and_rewards(seen: Seen) -> None:
    play = next(span for span in seen.trace.values() if span.name == "play")
    assert play.attributes["tailrace.outcome"] in ("ok", "policy_failure")
    assert isinstance(play.attributes["tailrace.reward"], float)
    messages = json.loads(str(play.attributes["gen_ai.output.messages"]))
    assert messages[0]["role"] == "assistant"
    turn = next(span for span in seen.trace.values() if span.name == "turn")
    assert turn.attributes["gen_ai.usage.output_tokens"]


def test_a_receiver_that_hangs_ends_no_run_and_is_counted(seen: Seen) -> None:
    assert seen.exit_code == 0, seen.printed
    assert seen.counted["sent"] > 0
    assert sum(seen.counted[result] for result in ("failed", "dropped", "queued")) > 0


def test_every_query_of_every_dashboard_returns_data(seen: Seen) -> None:
    assert len(seen.dashboards) >= 7
    assert not any(seen.dashboards.values()), seen.dashboards


def test_every_alert_is_valid_and_asks_for_metrics_that_exist(seen: Seen) -> None:
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    assert seen.alerts == {rule["alert"]: "ok" for rule in rules}
    assert not seen.missing


def test_every_alert_has_a_remedy_in_the_documentation() -> None:
    page = (ROOT / "docs" / "observe.md").read_text()
    for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]:
        assert f"`{rule['alert']}`" in page


def _below(seen: Seen, parent: ReceivedSpan) -> list[ReceivedSpan]:
    found = [span for span in seen.trace.values() if span.parent == parent.span_id]
    return sorted(found, key=lambda span: (span.start_ns, span.end_ns))


def _ancestors(seen: Seen, span: ReceivedSpan) -> Iterator[ReceivedSpan]:
    while span.parent:
        span = seen.trace[span.parent]
        yield span
