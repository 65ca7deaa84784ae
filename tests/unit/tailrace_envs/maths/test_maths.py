"""Word problems: answers, attempts, data sets and generated problems."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.config import ConfigError
from tailrace_envs import make_env
from tailrace_envs.maths.environment import (
    INSTRUCTION,
    NO_ANSWER,
    MathsText,
    comparison,
    extract_answer,
    is_same_number,
)
from tailrace_envs.maths.problems import problem_for_seed
from tailrace_envs.splits import is_held_out


def test_a_right_answer_pays_and_ends() -> None:
    env = MathsText()
    observation, _ = env.reset(seed=4)
    assert observation == env.problem.question + INSTRUCTION
    answer, reward, terminated, truncated, info = env.step(
        f"I think.\n#### {env.problem.answer}.0\nbye"
    )
    assert (answer, reward, terminated, truncated) == ("That is right.", 1.0, True, False)
    assert (info["success"], info["num_attempts"]) == (1.0, 1.0)


def test_a_wrong_answer_may_be_mended_for_less() -> None:
    env = MathsText(max_attempts=3, attempt_discount=0.5)
    env.reset(seed=4)
    assert env.step("#### -1")[:3] == ("-1 is not right. Attempts left: 2.", 0.0, False)
    assert env.step(f"#### {env.problem.answer}")[1:3] == (0.5, True)


def test_attempts_run_out() -> None:
    env = MathsText(max_attempts=2, invalid_action_penalty=0.25)
    env.reset(seed=0)
    observation, reward, *_, info = env.step("It is 7.")
    assert (observation, reward) == (NO_ANSWER + "Attempts left: 1.", -0.25)
    assert info["invalid_action"] is True
    _, _, terminated, truncated, info = env.step("#### x")
    assert (terminated, truncated, info["success"]) == (False, True, 0.0)


def test_the_last_mark_counts() -> None:
    assert extract_answer("#### 3\nno, #### $4 \nthat is it") == "$4"
    assert extract_answer("four") is None
    assert extract_answer("####") is None


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("#### **42**", "42"),
        ("**#### 42**", "42"),
        ("#### **-.5.**\n", "-.5"),
        ("#### `1/2` .", "1/2"),
        ("#### 2*3", "2*3"),
        ("#### **42**\r\nbye", "42"),
        ("####\t42\t\nbye", "42"),
        ("#### **", None),
    ],
)
def test_marks_of_bold_text_are_no_part_of_an_answer(reply: str, answer: str | None) -> None:
    assert extract_answer(reply) == answer


@pytest.mark.parametrize(
    ("said", "truth", "is_right"),
    [
        ("1,200", "1200", True),
        ("$3.50", "7/2", True),
        ("50%", "50", True),
        ("3.1", "3", False),
        ("\\boxed{8}", "8", True),
        ("\\frac{1}{2}", "0.5", True),
        ("18 apples", "18", True),
        ("1/0", "1", False),
        ("9" * 65, "9" * 65, False),
    ],
)
@pytest.mark.parametrize("equality", ["number", "expression"])
def test_numbers_are_compared_exactly(said: str, truth: str, is_right: bool, equality: str) -> None:
    assert comparison(equality)(said, truth) is is_right  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "truth", "is_right"),
    [
        ("\\sqrt{16}", "4", True),
        ("2^{3}", "8", True),
        ("x + 1", "2", False),
        ("9^{9^{9}}", "1", False),
        ("9^{99999}", "1", False),
        ("99999!", "1", False),
        ("nothing at all", "1", False),
    ],
)
def test_expressions_are_compared_by_value_in_bounded_time(
    said: str, truth: str, is_right: bool
) -> None:
    assert comparison("expression")(said, truth) is is_right
    assert comparison("number")(said, truth) is False


@given(st.text(max_size=80))
def test_no_text_breaks_the_reading_of_numbers(text: str) -> None:
    assert not is_same_number(text, "1") or any(char.isdigit() for char in text)


@given(st.integers(0, 2**40))
def test_a_generated_problem_says_what_its_answer_is_computed_from(seed: int) -> None:
    problem = problem_for_seed(3, 20, "all", seed)
    assert int(problem.answer) > 0
    assert computed(problem.question) == int(problem.answer)


def computed(question: str) -> int:
    """Computes the answer from the text."""
    number = 0
    for sentence in question.split(". "):
        words = sentence.split()
        told = [int(word) for word in words if word.isdigit()]
        if "parts" in words:
            assert number % told[0] == 0
            number //= told[0]
        elif "times" in words:
            number *= told[0]
        elif "gives" in words:
            number -= told[0]
        elif told:
            number += told[0]
    return number


def test_more_operations_and_larger_numbers_are_keys() -> None:
    def sentences(**options: int) -> int:
        return MathsText(**options).reset(seed=1)[0].count(". ")

    assert sentences(num_operations=6) == sentences(num_operations=2) + 4
    numbers = [
        int(word)
        for seed in range(20)
        for word in problem_for_seed(2, 5, "all", seed).question.replace(".", "").split()
        if word.isdigit()
    ]
    assert max(numbers) <= 5


def test_held_out_problems_are_never_train_problems() -> None:
    train, held_out = (
        {problem_for_seed(2, 9, split, seed) for seed in range(300)} for split in ("train", "held_out")
    )
    assert train.isdisjoint(held_out)
    assert all(is_held_out(problem.question) for problem in held_out)
    assert not any(is_held_out(problem.question) for problem in train)


def test_problems_come_from_a_data_set(tmp_path: Path) -> None:
    rows = [
        {"question": "One and one?", "answer": "Easy.\n#### 2"},
        {"question": "Half of one?", "answer": "\\frac{1}{2}"},
        {"question": "Twelve hundred?", "answer": 1200},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    env = MathsText(dataset={"path": str(path)}, instructions=False)
    assert [env.reset(seed=seed)[0] for seed in range(4)] == [
        "One and one?", "Half of one?", "Twelve hundred?", "One and one?",
    ]  # fmt: skip
    for seed, answer in enumerate(("2", "0.5", "1,200")):
        env.reset(seed=seed)
        assert env.step(f"#### {answer}")[1] == 1.0


def test_a_row_without_a_question_names_its_place(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "answer": "1"}\n{"problem": "b", "answer": "2"}\n')
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: key 'question' must be text .*converter"):
        make_env("maths", {"dataset": {"path": str(path)}})


@pytest.mark.parametrize(
    ("env_config", "named"),
    [
        ({"max_attempts": 0}, "max_attempts"),
        ({"num_operations": 0}, "num_operations"),
        ({"max_number": 1}, "max_number"),
        ({"attempt_discount": 2.0}, "attempt_discount"),
        ({"invalid_action_penalty": -1.0}, "invalid_action_penalty"),
        ({"equality": "same"}, "equality"),
        ({"dataset": {"path": "a.jsonl"}, "split": "held_out"}, "dataset.split"),
        ({"dataset": {"path": "no/such.jsonl"}}, r"dataset.path: cannot read"),
        ({"max_attempt": 1}, "did you mean 'max_attempts'"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(env_config: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make_env("maths", env_config)
