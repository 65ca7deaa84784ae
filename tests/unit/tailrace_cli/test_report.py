"""`report.html` and `comparison.html` show what the files of runs hold, without outside requests."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
import tracemalloc
from pathlib import Path

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from tailrace.config import ConfigError
from tailrace_agents.adapters.kept_episodes import KeptEpisode
from tailrace_cli.__main__ import app
from tailrace_cli.launch import command_line, read_launches, record_launch
from tailrace_cli.reporting.digest import RunDigest
from tailrace_cli.reporting.episodes import chosen_episodes
from tailrace_cli.reporting.pages import RunReport, differences, write_comparison
from tailrace_cli.run_folders import RunFolder
from tailrace_protos.chat import ChatMessage, ToolCall
from tailrace_protos.episode import Outcome
from tailrace_protos.event import (
    EpisodeSettled,
    EvaluationFinished,
    Event,
    EventBody,
    GroupClosed,
    RunFinished,
    StepFinished,
    WeightsPublished,
)
from tests.unit.tailrace_scheduler.simulation import made_settlement

HOSTILE = "</script><script>alert(1)</script>"


def settled(group: str, member: int, length: int, version: int) -> EpisodeSettled:
    """A training episode of `length` tokens, sampled with the weights `version`."""
    return msgspec.structs.replace(
        made_settlement(group, member, Outcome.OK),
        num_sampled_tokens=length,
        num_turns=length // 2,
        min_policy_version=version,
    )


BODIES: tuple[EventBody, ...] = (
    WeightsPublished(1, "a", 0, 10),
    settled("t0", 0, 4, 1),
    settled("t0", 1, 6, 1),
    StepFinished("a", 1, 2, ("t0",), 0, 0.0, 1.0, {}),
    WeightsPublished(2, "a", 1, 10),
    settled("t1", 0, 6, 1),
    StepFinished("a", 2, 3, ("t1",), 0, 0.0, 1.0, {}),
    msgspec.structs.replace(made_settlement("t2", 0, Outcome.TIMEOUT), reason="too late"),
    EvaluationFinished("e0-v1", 0, 0.25, 0.25, 4, 4),
    EvaluationFinished("e2-v3", 2, 0.75, 0.75, 4, 4),
    RunFinished(2, "all steps are done"),
)


def lines(*bodies: EventBody) -> bytes:
    events = (Event(f"{n}-0", float(n), "test", body) for n, body in enumerate(bodies))
    return b"".join(msgspec.json.encode(event) + b"\n" for event in events)


def kept(evaluation: str, number: int, reward: float, *messages: ChatMessage) -> KeptEpisode:
    return KeptEpisode(
        f"{evaluation}.{number}.0", f"{evaluation}.{number}", "calc", number, False, Outcome.OK, "",
        reward, reward, {}, (reward,), messages,
    )  # fmt: skip


def make_run(root: Path, name: str = "lake", success: float = 0.75) -> Path:
    folder = root / name
    (folder / "episodes").mkdir(parents=True)
    config = {"exp_name": name, "max_steps": 2, "learner": {"pg_clip": success}, "note": HOSTILE}
    (folder / "config.yaml").write_text(json.dumps(config))
    rows = [
        {"step": 0, "time_s": 5.0, "eval/success_rate": 0.25, "idle/weights": 3.0, "idle/tool": 1.0},
        {"step": 1, "time_s": 9.0, "eval/success_rate": None, "reward_mean": 0.5, "busy/learner": 4.0},
        {"step": 2, "time_s": 12.0, "eval/success_rate": success, "reward_mean": 0.625},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "events.jsonl").write_bytes(lines(*BODIES))
    call = ToolCall("1", "add", '{"a": 2}')
    episodes = [kept("e0-v1", n, n / 4, ChatMessage("user", f"first {n}")) for n in range(3)]
    episodes += [
        kept("e2-v3", 0, 1.0, ChatMessage("assistant", HOSTILE, (call,)), ChatMessage("tool", "4")),
        kept("e1-v2", 0, 1.0, ChatMessage("user", "neither first nor last")),
    ]
    content = b"".join(msgspec.json.encode(each) + b"\n" for each in episodes)
    (folder / "episodes" / "agents.jsonl").write_bytes(content + b'{"torn')
    return folder


def page_of(folder: Path) -> str:
    return RunReport(RunFolder(folder)).write().read_text()


def test_a_page_makes_no_outside_request_and_runs_no_text_of_an_episode(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path))
    assert "default-src 'none'" in page
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//|@import|url\(", page)
    assert HOSTILE not in page
    assert page.count("<script") == 3


def test_figures_stand_beside_those_of_the_start(tmp_path: Path) -> None:
    text = " ".join(re.sub(r"<[^>]*>", " ", page_of(make_run(tmp_path)).partition("<main>")[2]).split())
    assert "Held-out success, sampled at temperature 1 0.750 from 0.250" in text
    assert "Optimizer steps 2 of 2" in text
    assert "Failed episodes 1" in text
    assert "work of the learner 4.0 s, 50%" in text
    assert "waiting for weights 3.0 s, 38%" in text
    assert "too late" in text


def test_sampled_and_greedy_success_stand_beside_the_best_simple_player(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row, greedy in zip(rows, (0.125, None, 0.875), strict=True):
        row["eval/greedy/success_rate"] = greedy
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    players = {"held_out_lake": {"random": 0.0, "avoid the next hole": 0.625, "safe random": 0.25}}
    (folder / "baselines.json").write_text(json.dumps(players))
    page = page_of(folder)
    text = " ".join(re.sub(r"<[^>]*>", " ", page.partition("<main>")[2]).split())
    assert "Held-out success, greedy 0.875 from 0.125" in text
    assert "Best simple player 0.625 avoid the next hole" in text
    data = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert data
    (panel,) = [one for one in json.loads(data[1])["panels"] if one["title"] == "Success rate"]
    assert panel["labels"] == ["held-out, sampled", "held-out, greedy"]
    (table,) = panel["tables"]
    assert table["values"] == [[0.25, None, 0.75], [0.125, None, 0.875]]


def test_the_best_simple_player_is_that_of_the_first_named_evaluation(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["evaluations"] = {"small": {"tag": "lake"}, "large": {"tag": "lake"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    players = {"large": {"random": 0.9}, "small": {"random": 0.1, "safe random": 0.3}}
    (folder / "baselines.json").write_text(json.dumps(players))
    text = " ".join(re.sub(r"<[^>]*>", " ", page_of(folder)).split())
    assert "Best simple player 0.300 safe random" in text


def test_a_digest_reads_on_and_counts_each_episode_once(tmp_path: Path) -> None:
    path, content = tmp_path / "events.jsonl", lines(*BODIES)
    digest = RunDigest(path)
    digest.read_on()  # there is no file yet
    for end in range(0, len(content), 97):  # torn lines wait for their end
        path.write_bytes(content[:end])
        digest.read_on()
    path.write_bytes(content)
    digest.read_on()
    assert digest.lengths == {4: 1, 6: 2}
    assert digest.turns == {2: 1, 3: 2}
    assert digest.staleness == {0: 2, 1: 1}
    assert digest.outcomes["train"] == {"ok": 3, "timeout": 1}
    assert digest.evaluations == {0: "e0-v1", 2: "e2-v3"}


def test_a_digest_forgets_groups_that_nobody_trains(tmp_path: Path) -> None:
    """The page of a run is kept up to date for weeks, in one process."""
    path, digest = tmp_path / "events.jsonl", RunDigest(tmp_path / "events.jsonl")

    def held_bytes(first: int) -> int:
        with path.open("ab") as file:
            for n in range(first, first + 500):
                closed = GroupClosed(f"t{n}", "train", 1, 4, n % 100 == 99, 0)
                trained = (StepFinished("a", n, n, (f"t{n}",), 0, 0.0, 1.0, {}),) * (n % 100 == 99)
                file.write(lines(settled(f"t{n}", 0, 4, 1), closed, *trained))
        digest.read_on()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    early = held_bytes(0)
    late = held_bytes(500)
    tracemalloc.stop()
    assert late - early < 20_000  # of the groups 200,000
    assert digest.lengths == {4: 1000}


def test_best_median_and_worst_of_the_first_and_last_evaluation_are_shown(tmp_path: Path) -> None:
    first, final = chosen_episodes(make_run(tmp_path), {0: "e0-v1", 1: "e1-v2", 2: "e2-v3"})
    assert [(shown.place, shown.episode.reward) for shown in first.episodes] == [
        ("best of 3", 0.5),
        ("median of 3", 0.25),
        ("worst of 3", 0.0),
    ]
    best = final.episodes[0]
    assert (final.step, best.turns[0].calls, best.turns[0].reward) == (2, ('add({"a": 2})',), 1.0)
    assert "neither first nor last" not in page_of(tmp_path / "lake")


def test_several_runs_are_compared_on_one_page(tmp_path: Path) -> None:
    folders = [str(make_run(tmp_path, name, success)) for name, success in (("a", 0.5), ("b", 0.75))]
    page = tmp_path / "both.html"
    result = CliRunner().invoke(app, ["report", *folders, "-o", str(page)], catch_exceptions=False)
    assert result.exit_code == 0
    text = " ".join(re.sub(r"<[^>]*>", " ", page.read_text()).split())
    assert "0.500 from 0.250 0.750 from 0.250" in text
    assert "learner.pg_clip 0.5 0.75" in text


def test_runs_of_one_name_are_told_apart_and_a_run_given_twice_is_shown_once(tmp_path: Path) -> None:
    runs = [RunFolder(make_run(tmp_path / folder, "lake")) for folder in ("a", "b", "c")]
    page = write_comparison([*runs[:2], runs[0]], tmp_path / "both.html").read_text()
    assert [page.count(f">{run.path}</th>") > 0 for run in runs] == [True, True, False]
    assert (
        len(json.loads(page.partition('id="data">')[2].partition("<")[0])["panels"][0]["labels"]) == 2
    )


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot write .*nowhere/x.html: No such file"):
        CliRunner().invoke(
            app, ["report", str(folder), "-o", f"{tmp_path}/nowhere/x.html"], catch_exceptions=False
        )


def test_only_settings_that_differ_are_listed() -> None:
    runs = {"a": {"exp_name": "a", "x": {"y": 1, "z": 2}}, "b": {"exp_name": "b", "x": {"y": 1}}}
    assert differences(runs) == {"x.z": ["2", "null"]}


def test_every_start_of_a_run_is_recorded_for_its_owner_alone(tmp_path: Path) -> None:
    for _ in range(2):
        record_launch(tmp_path, tmp_path)
    assert [sorted(each.versions)[-1] for each in read_launches(tmp_path)] == ["transformers"] * 2
    assert stat.S_IMODE((tmp_path / "launch.json").stat().st_mode) == 0o600
    page = make_run(tmp_path, "page") / "report.html"
    page_of(page.parent)
    assert stat.S_IMODE(page.stat().st_mode) == 0o600


def test_a_recorded_command_has_no_credentials() -> None:
    words = ["/bin/tailrace", "train", "a b", "--attach", "nats://me:secret@host:1", "redis://host"]
    assert command_line(words) == "tailrace train 'a b' --attach nats://host:1 redis://host"


def shown_by_a_browser(page: Path, folder: Path) -> str:
    """The page's elements once its script has run."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on this machine")
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000")
    command = [browser, *options, f"--user-data-dir={folder}/browser", "--dump-dom", f"file://{page}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_a_browser_draws_the_curves(tmp_path: Path) -> None:
    page_of(make_run(tmp_path))
    drawn = shown_by_a_browser(tmp_path / "lake" / "report.html", tmp_path)
    assert drawn.count("<canvas") == 2  # success and reward: no other panel has values


def test_what_a_reader_has_chosen_stays_when_the_page_reloads(tmp_path: Path) -> None:
    text = page_of(make_run(tmp_path))
    num_parts = text.count("<details")
    kept = {"axis": 1, "zoom": [None, {"min": 6, "max": 8}], "open": [True] * num_parts, "top": 0}
    before = (
        f"<script>sessionStorage.setItem('kept of lake', JSON.stringify({json.dumps(kept)}))</script>"
    )
    page = tmp_path / "again.html"
    page.write_text(text.replace("<title>", f"{before}<title>"))
    shown = shown_by_a_browser(page, tmp_path)
    assert re.search(r'data-axis="1" aria-pressed="true"', shown)
    assert shown.count("<details open") == num_parts
