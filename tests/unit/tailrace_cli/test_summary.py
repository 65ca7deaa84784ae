"""The table at the end of a run says what the metrics say."""

from __future__ import annotations

from tailrace_cli.summary import NO_HEALTH, Row, summary_rows

START: Row = {"step": 0, "time_s": 10.0, "eval/success_rate": 0.2}
BUSY: Row = {
    "step": 1,
    "time_s": 15.0,
    "num_trained_tokens": 900.0,
    "tokens_per_s": 180.0,
    "outcome/ok": 8,
}
EMPTY: Row = {
    "step": 2,
    "time_s": 20.0,
    "num_trained_tokens": 0.0,
    "tokens_per_s": 0.0,
    "outcome/ok": 8,
}


def test_the_rate_is_that_of_the_run_and_not_of_a_last_step_that_had_nothing_to_train() -> None:
    assert dict(summary_rows([START, BUSY, EMPTY]))["trained tokens per second"] == "90"


def test_time_in_which_a_run_was_stopped_is_no_time_of_work() -> None:
    first: Row = START | {"idle/weights": 10.0}
    step: Row = {"step": 1, "time_s": 14.0, "num_trained_tokens": 300, "busy/learner": 4.0}
    resumed: Row = {"step": 2, "time_s": 1020.0, "num_trained_tokens": 300, "busy/learner": 6.0}
    rows = dict(summary_rows([first, step, resumed]))
    assert rows["trained tokens per second"] == "60"
    assert rows["wall time"] == "1020.0 s, of them 1000.0 s stopped"
    assert dict(summary_rows([first, step]))["wall time"] == "14.0 s"


def test_a_run_that_only_evaluated_has_no_rate() -> None:
    rows = dict(summary_rows([START]))
    assert "trained tokens per second" not in rows
    assert rows["held-out success, sampled at temperature 1, step 0"] == "0.200"


def test_sampled_and_greedy_success_stand_beside_the_baselines_by_name() -> None:
    end: Row = {"step": 2, "eval/success_rate": 0.75, "eval/greedy/success_rate": 0.8}
    start: Row = START | {"eval/greedy/success_rate": 0.0}
    rows = dict(summary_rows([start, BUSY, end], NO_HEALTH, {"lake": {"safe random": 0.079}}, 0.7))
    held_out = {name: value for name, value in rows.items() if name.startswith("held-out")}
    assert held_out == {
        "held-out success, sampled at temperature 0.7, step 0": "0.200",
        "held-out success, sampled at temperature 0.7, step 2": "0.750",
        "held-out success, greedy, step 0": "0.000",
        "held-out success, greedy, step 2": "0.800",
        "held-out success of a simple player: safe random": "0.079",
    }


def test_an_evaluation_at_temperature_0_is_named_greedy_and_each_baseline_has_its_tag() -> None:
    baselines = {"lake": {"random": 0.01}, "shop": {"random": 0.02}}
    rows = dict(summary_rows([START], NO_HEALTH, baselines, 0.0))
    assert rows["held-out success, greedy, step 0"] == "0.200"
    assert rows["held-out success of a simple player: random (shop)"] == "0.020"


def test_outcomes_are_summed_and_those_that_never_occurred_left_out() -> None:
    rows = dict(summary_rows([START, BUSY, EMPTY | {"outcome/timeout": 0}]))
    assert rows["episodes ok"] == "16"
    assert "episodes timeout" not in rows
