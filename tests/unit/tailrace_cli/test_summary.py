"""The table at the end of a run says what the metrics say."""

from __future__ import annotations

from tailrace_cli.summary import Row, summary_rows

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


def test_a_run_that_only_evaluated_has_no_rate() -> None:
    rows = dict(summary_rows([START]))
    assert "trained tokens per second" not in rows
    assert rows["held-out success, step 0"] == "0.200"


def test_outcomes_are_summed_and_those_that_never_occurred_left_out() -> None:
    rows = dict(summary_rows([START, BUSY, EMPTY | {"outcome/timeout": 0}]))
    assert rows["episodes ok"] == "16"
    assert "episodes timeout" not in rows
