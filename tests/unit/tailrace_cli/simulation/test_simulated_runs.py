"""Simulated runs: they repeat, their accounts balance, and rules show in them."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.scheduling.policies.sticky import LeastInFlight
from tailrace.config import ConfigError
from tailrace_cli.__main__ import app
from tailrace_cli.simulation.engine import SimEngine, SimTurn
from tailrace_cli.simulation.learner import SimLearner
from tailrace_cli.simulation.patience import MOST_LOST, Patience, StuckRunError, ideal_s
from tailrace_cli.simulation.records import Fault, SimEpisode, SimGroup, SimSettings
from tailrace_cli.simulation.traces import load_trace
from tailrace_cli.simulation.workload import BUILT_IN, TurnPlan
from tailrace_cli.simulation.world import World
from tailrace_scheduler.core.streams.settings import EngineModel

SMALL = {"servers": 2, "groups_per_step": 4, "warmup_steps": 2, "steps": 3, "max_staleness": 1}


def run(workload: str = "logn", **settings: object) -> dict[str, object]:
    return World(SimSettings(**SMALL | settings), BUILT_IN[workload]).run()  # type: ignore[arg-type]


def test_a_run_repeats_with_its_seed() -> None:
    assert run(seed=3) == run(seed=3)
    assert run(seed=3) != run(seed=4)


def test_a_lonely_request_takes_the_time_of_the_engine_model() -> None:
    model = EngineModel()
    engine = SimEngine("s0", model)
    engine.submit(SimTurn("g0.0", 1000, 0, 100), 0.0)
    due_s = engine.next_event_s()
    steps = sum(model.step_s(1, 1000 + token) for token in range(100))
    assert due_s == pytest.approx(1000 * model.e_s + steps)
    engine.advance(due_s)
    assert [turn.context for turn in engine.finished()] == [1100]
    assert engine.kv == 0


def test_the_newest_request_is_preempted_and_prefilled_again() -> None:
    engine = SimEngine("s0", EngineModel(kv_tokens=3000))
    for name in ("old", "new"):
        engine.submit(SimTurn(name, 1000, 0, 900), 0.0)
    engine.advance(engine.next_event_s())
    assert engine.finished() == []
    assert list(engine.running) == ["old"]
    assert [turn.episode_id for turn in engine.waiting] == ["new"]
    engine.advance(engine.next_event_s())
    assert [turn.episode_id for turn in engine.finished()] == ["old"]
    engine.admit()
    assert engine.recomputed == engine.kv == 1500


def test_new_weights_cost_the_kv_of_what_runs_and_every_idle_prefix() -> None:
    engine = SimEngine("s0", EngineModel(host_kv_tokens=5000))
    engine.submit(SimTurn("g0.0", 1000, 0, 100), 0.0)
    engine.keep_idle("g0.1", 400)
    engine.host["g0.2"] = engine.host_tokens = 300
    begun_s = engine.time_s
    engine.recompute()
    assert engine.time_s - begun_s == pytest.approx(1000 * engine.model.e_s)
    assert [engine.cached(name) for name in ("g0.1", "g0.2")] == [0, 0]


def test_a_run_that_recomputes_at_each_version_spends_its_time_on_prefill() -> None:
    kept, recomputed = run(), run(recomputes=True)
    assert kept["reprefill"] < 0.01 < recomputed["reprefill"]
    assert recomputed["seconds_per_step"] > kept["seconds_per_step"]


@pytest.mark.parametrize("is_told", [True, False])
def test_prefixes_of_ended_episodes_stay_where_engines_are_not_told(is_told: bool) -> None:
    settings = SimSettings(**SMALL, releases_prefixes=is_told)  # type: ignore[arg-type]
    world = World(settings, BUILT_IN["logn"])
    world.run()
    _, num_running, used = world.timeline[-1]
    assert (min(used) > 0.9) is not is_told, (num_running, used)


def test_released_prefixes_make_room_for_others() -> None:
    engine = SimEngine("s0", EngineModel(kv_tokens=3000))
    for name in ("a", "b"):
        engine.keep_idle(name, 1000)
    engine.release("b")
    engine.submit(SimTurn("c", 1500, 0, 10), 0.0)
    assert (engine.cached("a"), engine.cached("b")) == (1000, 0)


def test_tokens_count_in_the_window_in_which_they_were_sampled() -> None:
    learner = SimLearner(SimSettings(rho=1.0), capacity=1.0)
    engine = SimEngine("s0", EngineModel())
    engine.window = (10, 20)
    group = SimGroup("g0", [], 2)
    plan = (TurnPlan(100, 10, 1.0), TurnPlan(50, 12, 0.0))
    for outcome in ("valid", "cut"):
        episode = SimEpisode(f"g0.{outcome}", plan, group, outcome=outcome)
        episode.spans = [(engine, 5, 15, 100, 100), (engine, 15, 27, 160, 50)]
        group.episodes.append(episode)
    learner.throw(group.episodes[1])
    learner.take(group)
    tally = learner.tally
    assert (tally.trained.sampled, tally.trained.prefilled) == (22, 150)
    assert (tally.useful.sampled, tally.useful.prefilled) == (10, 50)
    assert tally.useful.context_sum == sum(110 + n + 0.5 for n in range(-5, 0)) + sum(
        160 + n + 0.5 for n in range(5)
    )
    assert (tally.masked, tally.thrown) == (0.0, 10)


def test_efficiency_never_exceeds_the_time_that_engines_worked() -> None:
    """A learner that is late at the start has many groups to train in the window."""
    late = run(rho=0.2, policy="mask", steps=2, warmup_steps=5, max_staleness=8)
    assert late["trained_work"] > late["efficiency"]  # type: ignore[operator]
    for warmup_steps in (1, 3, 5):
        made = run(rho=0.2, policy="mask", steps=2, warmup_steps=warmup_steps, max_staleness=8)
        assert made["efficiency"] <= made["decode"] + made["prefill"]  # type: ignore[operator]


@pytest.mark.parametrize(("policy", "is_lost"), [(LeastInFlight, True), (None, False)])
def test_a_failing_server_costs_a_baseline_the_episodes_it_attracts(
    policy: type[LeastInFlight] | None, is_lost: bool
) -> None:
    faulty = SimSettings(**SMALL | {"servers": 4}, faults=(Fault(0, fails=True),))  # type: ignore[arg-type]
    made = World(faulty, BUILT_IN["logn"], policy).run()
    assert (made["lost_groups"] > 0.1) is is_lost


def test_a_run_whose_servers_all_fail_is_given_up() -> None:
    with pytest.raises(StuckRunError, match="step 0 took more than 20 times"):
        run(servers=1, faults=(Fault(0, fails=True),))


def test_a_policy_that_loses_nearly_every_group_is_given_up() -> None:
    faulty = SimSettings(
        **SMALL | {"servers": 4, "groups_per_step": 64},  # type: ignore[arg-type]
        faults=(Fault(0, fails=True),),
    )
    with pytest.raises(StuckRunError, match="lost more than 100 groups for each of the 64"):
        World(faulty, BUILT_IN["logn"], LeastInFlight).run()


def test_every_step_has_the_whole_patience() -> None:
    settings = SimSettings(**SMALL)  # type: ignore[arg-type]
    least_s = ideal_s(settings, 2.0, BUILT_IN["logn"])
    patience = Patience(settings, least_s)
    patience.check(20 * least_s, MOST_LOST * settings.groups_per_step)
    patience.step_done(20 * least_s)
    patience.check(39 * least_s, 0)
    with pytest.raises(StuckRunError, match="step 1"):
        patience.check(41 * least_s, 0)


def test_the_ideal_time_is_less_than_any_policy_takes() -> None:
    for staleness in (0, 2):
        settings = SimSettings(**SMALL | {"max_staleness": staleness, "policy": "wait"})  # type: ignore[arg-type]
        made = World(settings, BUILT_IN["agent"]).run()
        least_s = ideal_s(settings, 2.0, BUILT_IN["agent"])
        assert least_s < (staleness + 1) * made["seconds_per_step"] < 20 * least_s


@pytest.mark.parametrize("workload", ["logn", "pareto"])
def test_the_mean_reply_has_4096_tokens(workload: str) -> None:
    rng = np.random.default_rng(1)
    draws = [BUILT_IN[workload].draw(rng, 16) for _ in range(8_000)]
    lengths = [plan[0].output_tokens for group in draws for plan in group]
    assert np.mean(lengths) == pytest.approx(4_096, rel=0.03)


def test_idle_prefixes_leave_least_recently_used_first() -> None:
    engine = SimEngine("s0", EngineModel(kv_tokens=3000))
    for name in ("a", "b"):
        engine.keep_idle(name, 1000)
    engine.submit(SimTurn("c", 1500, 0, 10), 0.0)
    assert (engine.cached("a"), engine.cached("b")) == (500, 1000)


def test_waiting_for_old_groups_masks_nothing() -> None:
    assert run(policy="wait", steps=6)["masked"] == 0.0
    assert run(policy="mask", steps=6)["masked"] > 0.05  # type: ignore[operator]


def test_a_server_that_fails_takes_nothing_from_the_others() -> None:
    fault = run(servers=3, faults=(Fault(0, fails=True),), steps=4)
    whole = run(servers=2, steps=4)
    assert fault["efficiency"] == pytest.approx(whole["efficiency"], rel=0.15)


def test_a_trace_without_a_column_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("session_id,round_idx\n1,0\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"lacks the columns prefix_len, input_len"):
        load_trace(path)


def test_the_command_writes_its_result_and_pictures(tmp_path: Path) -> None:
    words = ["simulate", "--workload", "logn", "--servers", "1,2", "--episodes", "32"]
    words += ["--steps", "2", "--warmup-steps", "1"]
    done = CliRunner().invoke(app, [*words, "--to", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert {one.name for one in tmp_path.iterdir()} == {
        "ages.png",
        "result.json",
        "timeline_1.png",
        "timeline_2.png",
    }


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "truncated"),
        ('{"episodes": [1]}', "in the form of benchmarks/scheduling/traces"),
        ("{}", "needs the key `episodes`"),
    ],
)
def test_a_trace_that_is_none_is_refused_by_its_name(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=told) as refused:
        load_trace(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    "options",
    [("--to", __file__), ("--engine", "list.json"), ("--trace", "list.json")],
)
def test_an_option_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.json").write_text("[]")
    with pytest.raises(ConfigError, match=options[0]):
        CliRunner().invoke(app, ["simulate", *options], catch_exceptions=False)


@pytest.mark.parametrize("option", ["--steps", "--group-size", "--episodes", "--slow"])
def test_a_number_that_makes_no_run_is_refused(option: str) -> None:
    refused = CliRunner().invoke(app, ["simulate", option, "0"])
    assert refused.exit_code == 2
    assert option in refused.output


@pytest.mark.parametrize("option", ["--episodes", "--groups-per-step", "--group-size", "--steps"])
def test_a_number_without_measure_is_refused(option: str) -> None:
    refused = CliRunner().invoke(app, ["simulate", option, "99999999999"])
    assert refused.exit_code == 2
    assert option in refused.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--servers", "8,99999999999"], "--servers 99999999999: simulate at most 65,536"),
        (["--servers", "1024", "--max-staleness", "500"], "32,833,536 episodes are admitted at once"),
        (["--groups-per-step", "1000000", "--group-size", "1000000"], "lower --servers, --episodes"),
    ],
)
def test_a_run_that_no_memory_holds_is_refused_at_once(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        CliRunner().invoke(app, ["simulate", *words], catch_exceptions=False)


def test_the_name_of_a_workload_is_one_line_above_its_table() -> None:
    words = ["simulate", "--workload", "logn", "--servers", "1", "--episodes", "16", "--steps", "1"]
    first, second, *_ = CliRunner().invoke(app, [*words, "--warmup-steps", "0"]).output.splitlines()
    assert first == "logn, policy auto, seed 1"
    assert second.split() == ["servers", "1"]
