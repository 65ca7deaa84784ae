"""Scores of mathematical answers: equal forms, wrong ones, and replies that try to win otherwise."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from tailrace.scorers import aime, final_answer, gsm8k, is_equal, math, maths
from tailrace.scorers.answers import NoTruthError, without_thoughts
from tailrace.scorers.registry import check_truth

pytest.importorskip("math_verify", reason="the package math-verify is not installed")

GSM8K = Path(__file__).parents[5] / "shared" / "data" / "gsm8k"

EQUAL = [
    ("1/2", r"\frac{1}{2}"),
    (r"\dfrac12", r"\frac12"),
    ("0.75", r"\frac{3}{4}"),
    (r"1\frac{1}{2}", "1.5"),
    (r"-\frac{1}{3}", "-1/3"),
    (r"0.\overline{3}", r"\tfrac13"),
    (r"50\%", "0.5"),
    (r"10\%", "10"),
    ("1,000", "1000"),
    ("1{,}000", "1000.0"),
    (r"\$5", "5 dollars"),
    ("5 million", r"5\times 10^6"),
    ("−2", "-2"),
    (r"5\text{ cm}", "5"),
    (r"5 \mathrm{~cm}^2", "5"),
    ("120 square units", "120"),
    (r"90^\circ", "90 degrees"),
    (r"2\sqrt2", r"\sqrt{8}"),
    (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2"),
    ("(x+1)^2", "x^2+2x+1"),
    ("y = 1 + 2x", "y=2x+1"),
    ("x=3", "3"),
    ("(1, 2]", "(1,2]"),
    (r"x<2 \text{ or } x>3", r"(-\infty,2)\cup(3,\infty)"),
    (r"1 \le x < 3", "[1,3)"),
    (r"x \in [1,2]", "[1,2]"),
    (r"[2,3] \cup [0,1]", r"[0,1]\cup[2,3]"),
    (r"\{3,2,1\}", r"\{1,2,3\}"),
    ("3, 2, 1", "1,2,3"),
    (r"1+\sqrt2, 1-\sqrt2", r"1 \pm \sqrt{2}"),
    (r"(3,\pi/2)", r"(3, \frac{\pi}{2})"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("4i+3", "3+4i"),
    ("5040", "7!"),
    (r"\log_2 8", "3"),
    ("Monday", r"\text{Monday}"),
    ("A", r"\text{(A)}"),
    (r"\varnothing", r"\emptyset"),
    ("3 : 4", "3:4"),
    ("1 1/2", r"1\frac{1}{2}"),
    ("-2 1/2 hours", "-2.5"),
    (r"1\,\frac 1 2", "3/2"),
    ("1 000 000", "10^6"),
    (r"12\,000", "12,000"),
    (r"10,000\sqrt{2}", r"10000\sqrt2"),
    (r"1{,}000\pi", r"1000\pi"),
    ("x=1,000", "1000"),
    (r"x = 5\%", "0.05"),
    (r"\text{50 cents}", "50"),
    ("¥5", "5"),
    ("5 km/h", "5"),
    ("12in.", "12"),
    ("8 men", "8"),
    ("12 logs", "12"),
    ("7.5mph", r"7.5\text{ mph}"),
    ("12ft²", r"12\text{ ft}^2"),
    ("20 min", r"20\text{ minutes}"),
    ("5dollars", r"\$5"),
    (r"98.6^\circ F", "98.6"),
    (r"6\text{ hours }30\text{ minutes}", "6 hours 30 minutes"),
    (r"x\leqslant 3", r"(-\infty,3]"),
    ("x≥3", r"[3,\infty)"),
    (r"x\gt 3", r"(3,\infty)"),
    (r"x\in\left[1,2\right)", "[1,2)"),
    (r"\left(1,2\right]", "(1,2]"),
    ("3 > x", r"(-\infty,3)"),
    ("x∈(1,2)", "(1,2)"),
    ("2√3", r"2\sqrt{3}"),
    ("x² + 2·x", "x^2+2x"),
    (r"\frac{10!}{5!5!}", "252"),
    (r"\textbf{(C)}\ 5", "C"),
    ("(C)", r"\textbf{(C)}\ 5"),
    (r"\textbf{(C) } \frac{1}{2}", "0.5"),
    (r"\text{(C)}\qquad 5", r"\textbf{(C)}\ 5"),
]

DIFFERENT = [
    ("-3", "3"),
    ("5 million", "5"),
    ("1/3", "0.333"),
    ("(1,2)", "[1,2]"),
    ("(1,2)", r"\{1,2\}"),
    (r"1<x\le 2", "[1,2)"),
    ("Tuesday", r"\text{Monday}"),
    ("x+2", "x+1"),
    ("3,4", "3"),
    ("3 or 4", "3"),
    ("2 5", "5"),
    ("2 5", "25"),
    ("1 2/3", "12/3"),
    ("2xy", "2"),
    ("2ab", "2xy"),
    ("6abc", "6"),
    ("3sinx", "3"),
    ("4 lnx", "4"),
    (r"3\mathrm{i}", "3"),
    (r"2\mathrm{e}^2", "2"),
    (r"6\text{ ft }3\text{ in}", "63"),
    (r"6\text{ ft }3\text{ in}", "6"),
    (r"1\text{ and }2", "12"),
    (r"\mathrm{5}^2", "5"),
    ("101_2", "101_3"),
    ("x=5", "y=5"),
    (r"\textbf{(B)}\ 5", r"\textbf{(C)}\ 7"),
    (r"\textbf{(B)}\ 5", "C"),
    (r"\textbf{(B)}\ 5", "7"),
    ("(1,000)", "1000"),
    ("", "3"),
]

HOSTILE = [
    "9^{9^{9^{9}}}",
    "9**9**9**9",
    "((9^{99})^{99})^{99}",
    r"2^{x\cdot0+10^{10}}",
    "(10^5)!",
    "5!!!!!",
    r"\binom{1000000}{500000}",
    r"\sqrt[99999999]{9^{999}}",
    "1e999999999",
    "(" * 5000,
    r"\frac{" * 300,
    "1" * 100_000,
    "10^{999}" * 20,
    "x" * 300,
    "y +" + " " * 50_000 + "x",
    "√(" * 20_000,
    "1 " * 50_000,
]


@pytest.mark.parametrize(("answer", "truth"), EQUAL)
def test_equal_answers(answer: str, truth: str) -> None:
    assert is_equal(answer, truth)
    assert math(f"thus $\\boxed{{{answer}}}$.", truth) == 1.0


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_different_answers(answer: str, truth: str) -> None:
    assert not is_equal(answer, truth)


@pytest.mark.parametrize("answer", ["", "$$", r"\,", "."])
def test_an_empty_answer_is_wrong_whatever_the_truth(answer: str) -> None:
    assert not is_equal(answer, answer)
    for truth in (r"\{1, 2\}", "(1, 2)", "x", "5", answer or "0"):
        assert math(f"\\boxed{{{answer}}}", truth) == 0.0
        assert not is_equal(truth, answer)


@pytest.mark.parametrize("answer", HOSTILE)
def test_answers_that_could_explode_take_no_time(answer: str) -> None:
    started_s = time.thread_time()
    assert math(f"\\boxed{{{answer}}}", "3") == 0.0
    assert gsm8k(f"\\boxed{{{answer}}}", "#### 3") == 0.0
    assert time.thread_time() - started_s < 4.0


def test_a_comparison_of_hours_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maths, "MAX_CPU_S", 0.2)
    started_s = time.process_time()
    assert not is_equal(r"\Gamma(10^9)", "3")
    assert time.process_time() - started_s < 5.0


def test_other_threads_compare_without_signals() -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(is_equal(r"\frac{x}{2}", "x/2")))
    thread.start()
    thread.join()
    assert found == [True]


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (r"\boxed{1} no, wait: \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"it is \boxed{5", None),
        ("work\n#### 18\nbye", "18"),
        ("<answer> 7 </answer>", "7"),
        ("The answer is 42. It took long.", "42"),
        ("**Final answer:** $x^2$", "x^2"),
        ("Answer: 3.5", "3.5"),
        ("The answer is \\(x^2\\).", "x^2"),
        ("The answer is:\n\\[\n\\frac{1}{2}.\n\\]", r"\frac{1}{2}"),
        ("The answer is:\n$$\n7\n$$", "7"),
        ("The answer is therefore 42.", "42"),
        ("Answer: About a Boy", "About a Boy"),
        ("The answers are 3 and 4. Done.", "3 and 4"),
        ("Answer: St. Louis. It lies at a river.", "St. Louis"),
        ("The answer is J. K. Rowling. She wrote it.", "J. K. Rowling"),
        ("The answer is George W. Bush. He won.", "George W. Bush"),
        ("The answer is the U.S. Army. It", "the U.S. Army"),
        ("Answer: Sgt. Pepper", "Sgt. Pepper"),
        ("Answer: No. 1", "No. 1"),
        ("Answer: No. The dog sleeps.", "No"),
        ("The answer is B. The dog barks.", "B"),
        ("The answer is World War I. It began in 1914.", "World War I"),
        ("The answer is:\n\n**Paris**", "Paris"),
        ("no idea", None),
    ],
)
def test_the_final_answer_of_a_reply(reply: str, answer: str | None) -> None:
    assert final_answer(reply) == answer


def test_thoughts_are_no_answer() -> None:
    assert without_thoughts(r"<think>\boxed{3}</think> 4") == " 4"
    assert without_thoughts(r"<think>\boxed{3}") == ""


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        (r"so \boxed{70,000} dollars", 1.0),
        ("#### $70,000.00", 1.0),
        ("The answer is 70000 dollars.", 1.0),
        ("7 * 10000 = 70000", 1.0),
        ("#### 7*10000=70000", 1.0),
        ("#### 70000 or 80000", 0.0),
        (r"\boxed{70000} or rather \boxed{1}", 0.0),
        (r"70000 \boxed{}", 0.0),
        (r"70000 \boxed{", 0.0),
        ("", 0.0),
        ("70001", 0.0),
    ],
)
def test_gsm8k_reads_one_final_number(reply: str, score: float) -> None:
    assert gsm8k(reply, "3 + 4 = 7\n#### 70,000") == score


def test_strict_scorers_want_a_marked_answer() -> None:
    for scorer in (gsm8k, math, aime):
        assert scorer("The answer is 7.", "7") == 1.0
        assert scorer("The answer is 7.", "7", strict=True) == 0.0
        assert scorer(r"\boxed{7}", "7", strict=True) == 1.0


@pytest.mark.parametrize(
    ("reply", "score"), [(r"\boxed{033}", 1.0), ("#### 33", 1.0), (r"\boxed{33.5}", 0.0), ("1033", 0.0)]
)
def test_aime_answers_are_whole_numbers(reply: str, score: float) -> None:
    assert aime(reply, "33") == score


def test_a_truth_may_be_a_solution_or_a_list() -> None:
    assert math(r"\boxed{0.5}", r"We get $\boxed{\frac{1}{2}}$.") == 1.0
    assert math(r"\boxed{2}", ["1", "2"]) == 1.0
    assert math(r"\boxed{3}", ["1", "2"]) == 0.0


def test_the_solutions_of_gsm8k_are_right_and_other_numbers_are_wrong() -> None:
    folder = Path(os.environ.get("TAILRACE_GSM8K", GSM8K))
    if not (folder / "test.jsonl").is_file():
        pytest.skip(f"no GSM8K files in {folder}: name their folder in TAILRACE_GSM8K")
    for line in (folder / "test.jsonl").read_text().splitlines():
        solution = json.loads(line)["answer"]
        truth = solution.rpartition("####")[2].strip()
        assert gsm8k(solution, solution) == math(f"\\boxed{{{truth}}}", solution) == 1.0
        wrong = int(truth.replace(",", "")) + 1
        assert gsm8k(f"#### {wrong}", solution) == math(f"\\boxed{{{wrong}}}", solution) == 0.0


@pytest.mark.parametrize("truth", ["two", "#### none", "", []])
def test_a_truth_without_a_number_is_an_error_not_a_zero(truth: object) -> None:
    for scorer in (maths.gsm8k, maths.aime):
        with pytest.raises(NoTruthError, match="has no number"):
            scorer("\\boxed{2}", truth)


def test_a_solution_without_its_answer_is_an_error_not_a_zero() -> None:
    solution = "We add the numbers. " * 30
    row = {"data_source": "math", "solution": solution}
    for read in (lambda: math("\\boxed{2}", solution), lambda: check_truth("math", row)):
        with pytest.raises(NoTruthError, match=r"599 characters and no \\boxed: name the column"):
            read()
    assert math("\\boxed{2}", [solution, "2"]) == math("\\boxed{2}", solution + r"\boxed{2}") == 1.0
