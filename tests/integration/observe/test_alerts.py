"""Alert rules on the series of runs that go well and badly, by Prometheus's own `promtool`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.world.prometheus import MISSING, ROOT

ALERTS = ROOT / "helm" / "tailrace" / "files" / "alerts.yaml"
PROMTOOL = shutil.which("promtool") or shutil.which(
    "promtool", path=str(ROOT / ".prometheus" / "usr" / "bin")
)
STEP = 'tailrace_scheduler_step{run="a", phase="%s"}'
LEARNER = 'tailrace_learner_step{run="a"}'
SETTLED = 'tailrace_scheduler_settled_episodes_total{run="a", outcome="%s"}'
DELAYS = 'tailrace_runtime_event_loop_delay_seconds_%s{run="a", service="agents"%s}'
SERVERS = 'tailrace_scheduler_servers{run="a"}'

pytestmark = pytest.mark.skipif(PROMTOOL is None, reason=MISSING)


class Case(NamedTuple):
    """Values of series, one a minute, and minutes at which an alert must (not) fire."""

    alert: str
    series: dict[str, str]
    fires: tuple[int, ...] = ()
    rests: tuple[int, ...] = ()


CASES = {
    "a step each 10 minutes": Case(
        "TailraceNoProgress",
        {STEP % "training": " ".join(f"{step}x9" for step in range(12))},
        rests=(20, 50, 110),
    ),
    "a start of half an hour and a first step": Case(
        "TailraceNoProgress",
        {
            STEP % "starting": "0x14 _x99",
            STEP % "evaluating": "_x15 0x15 _x9",
            STEP % "training": "_x31 0x4 1x9",
            LEARNER: "0x35 1x9",
        },
        rests=(15, 20, 30, 44),
    ),
    "a warm start of two hours": Case(
        "TailraceNoProgress",
        {STEP % "warm_start": "0x120", LEARNER: "0x120"},
        rests=(20, 60, 120),
    ),
    "a run that ended after a final evaluation of 25 minutes": Case(
        "TailraceNoProgress",
        {
            STEP % "training": "0 1 2 3 4 5 _x99",
            STEP % "finishing": "_x6 5x25 _x99",
            LEARNER: "0 1 2 3 4 5x25 _x99",
        },
        rests=(31, 46, 50, 90),
    ),
    "a dead learner": Case(
        "TailraceNoProgress",
        {STEP % "training": "0 1 2 3 4 5x120", LEARNER: "0 1 2 3 4 5 _x120"},
        fires=(55, 90, 120),
    ),
    "a learner that starts again and again": Case(
        "TailraceNoProgress",
        {STEP % "training": "0 1 2 3 4 5x120", LEARNER: "0 1 2 3 4 5 " + "0 0 5 5 " * 29},
        fires=(55, 90, 115),
    ),
    "groups that the scheduler ends at their deadline": Case(
        "TailraceEpisodesFail",
        {SETTLED % "ok": "0+5x60", SETTLED % "timeout": "0+5x60"},
        fires=(30, 50),
    ),
    "few failures": Case(
        "TailraceEpisodesFail",
        {SETTLED % "ok": "0+50x60", SETTLED % "infra_failure": "0+5x60"},
        rests=(30, 50),
    ),
    "32 servers that start one after the other": Case(
        "TailraceServersFlap", {SERVERS: "0+1x32 32x60"}, rests=(10, 33, 40, 60)
    ),
    "a server that goes every 5 minutes": Case(
        "TailraceServersFlap", {SERVERS: "8 8 8 8 7 " * 12}, fires=(40, 55)
    ),
    "a loop that is blocked for 20 of 60 seconds": Case(
        "TailraceEventLoopBlocked",
        {
            DELAYS % ("count", ""): "0+161x60",
            DELAYS % ("bucket", ', le="0.005"'): "0+160x60",
            DELAYS % ("bucket", ', le="1.0"'): "0+160x60",
            DELAYS % ("bucket", ', le="20.0"'): "0+161x60",
            DELAYS % ("bucket", ', le="+Inf"'): "0+161x60",
        },
        fires=(30, 50),
    ),
    "a busy loop, whose timers are half a second late": Case(
        "TailraceEventLoopBlocked",
        {
            DELAYS % ("count", ""): "0+80x60",
            DELAYS % ("bucket", ', le="0.1"'): "0+0x60",
            DELAYS % ("bucket", ', le="1.0"'): "0+80x60",
            DELAYS % ("bucket", ', le="+Inf"'): "0+80x60",
        },
        rests=(30, 50),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_when_it_should_and_not_before(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    expected = {minute: True for minute in case.fires} | dict.fromkeys(case.rests, False)
    wrong = [
        f"{minute} min: {'silent' if fires else 'fires'}"
        for minute, fires in expected.items()
        if fired(case, minute, tmp_path) != fires
    ]
    assert not wrong


def fired(case: Case, minute: int, folder: Path) -> bool:
    """Whether promtool finds the alert firing; it expects none, and tells of all that fire."""
    tests: dict[str, Any] = {
        "rule_files": [str(ALERTS)],
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": each, "values": values} for each, values in case.series.items()
                ],
                "alert_rule_test": [{"eval_time": f"{minute}m", "alertname": case.alert}],
            }
        ],
    }
    file = folder / "tests.yaml"
    file.write_text(yaml.safe_dump(tests))
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", str(file)], check=False, capture_output=True, text=True
    )
    shown = done.stdout + done.stderr
    assert done.returncode == 0 or "got:" in shown, shown
    return done.returncode != 0
