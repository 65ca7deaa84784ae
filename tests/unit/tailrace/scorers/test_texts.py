"""Scores of choices, short answers and JSON; programs' tests; the choice of a scorer."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from referencing.exceptions import Unresolvable

from tailrace import scorers
from tailrace.scorers import (
    NoTruthError,
    UnknownSourceError,
    em,
    f1,
    json_schema,
    math,
    mcq,
    scorer_for,
    texts,
    truth_of,
)
from tailrace.scorers.code import ProgramTest, program_of, program_tests
from tailrace.scorers.registry import SCORERS, check_truth, score
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import EnvTask

CHOICES = {"choices": ["Berlin", "Paris", "Rome", "Oslo"]}


def test_scorers_that_are_functions_can_be_imported_by_their_names() -> None:
    functions = {name: spec.function for name, spec in SCORERS.items() if spec.function}
    assert {name: getattr(scorers, name) for name in functions} == functions
    assert SCORERS.keys() - functions.keys() == {"code", "judge"}  # as docs/scorers.md says


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("B", 1.0),
        ("b", 1.0),
        (r"\boxed{B}", 1.0),
        (r"\boxed{\text{(B)}}", 1.0),
        ("The answer is (B) because A is not.", 1.0),
        ("Answer: B. Paris", 1.0),
        ("The answer is Paris.", 1.0),
        ("I take option (B)", 1.0),
        ("It is not A.\nB", 1.0),
        ("The answer is A or B", 0.0),
        ("A, B, C, D", 0.0),
        ("The answer is C.", 0.0),
        ("A capital", 0.0),
        ("Answer: not B", 0.0),
        ("Answer: not A, it is B", 1.0),
        ("(b)", 1.0),
        ("Answer: b) Paris", 1.0),
        ("The correct option is (b)", 1.0),
        ("I take Option B because A is wrong", 1.0),
        ("(a) and (b)", 0.0),
        ("b) or a)", 0.0),
        ("", 0.0),
    ],
)
def test_one_choice_is_read(reply: str, score: float) -> None:
    for truth in ("B", 1, "Paris", "(B)"):
        assert mcq(reply, truth, CHOICES) == score
    assert mcq("3", "3", {"choices": {"text": ["a", "b"], "label": ["1", "3"]}}) == 1.0
    assert mcq("B", "B") == 1.0


def test_a_letter_is_no_option_of_that_text() -> None:
    articles = {"choices": ["the", "a", "an", "-"]}
    assert [mcq(said, "A", articles) for said in ("A", "Answer: a", "the")] == [1.0, 0.0, 1.0]
    assert mcq("Answer: -", "D", articles) == 1.0


def test_a_truth_that_is_no_option_is_an_error_not_a_zero() -> None:
    with pytest.raises(ValueError, match="none of the options"):
        mcq("B", "Madrid", CHOICES)


@pytest.mark.parametrize(
    ("said", "truth"),
    [
        ("O\u2019Neill", "O'Neill"),
        ("\u201cParis\u201d", "Paris"),
        ("1914\u20131918", "1914-1918"),
        ("Beyonce\u0301", "Beyonc\u00e9"),
        ("\u300c\u6771\u4eac\u300d", "\u6771\u4eac"),
        ("A", "A"),
        ("the the", "The The"),
        ("!!!", "!!!"),
    ],
)
def test_signs_of_all_scripts_and_answers_of_signs_alone_are_read(said: str, truth: str) -> None:
    assert em(f"Answer: {said}", truth) == f1(f"Answer: {said}", truth) == 1.0
    assert em("Answer: ?", truth) == em("Answer: an", truth) == 0.0


def test_short_answers_are_compared_as_squad_does() -> None:
    golds = {"target": ["The Beatles", "Beatles"]}
    assert em("<answer>beatles!</answer>", golds) == 1.0
    assert em("The answer is the Beatles.", golds) == 1.0
    assert em("Beatles and others", golds) == 0.0
    assert f1("<answer>the Beatles band</answer>", golds) == pytest.approx(2 / 3)
    assert f1("yes", "no") == f1("", "x") == em("", "x") == 0.0
    assert em("x", {"value": "y", "aliases": ["X"]}) == 1.0


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ('{"n": 1}', 1.0),
        ('Here:\n```json\n{"n": 1}\n```', 1.0),
        ('{"n": "1"}', 0.0),
        ("{n: 1}", 0.0),
        ("[" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_json_is_checked_by_its_schema(reply: str, score: float) -> None:
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        assert json_schema(reply, None, {"json_schema": schema}) == score
        assert json_schema(reply, schema) == score
    assert json_schema('{"n": 2}', '{"n": 1}', {"json_schema": SCHEMA}) == 0.0
    anything = {"json_schema": True}
    assert json_schema('{"n": [1.0]}', '{"n": [1]}', anything) == 1.0
    assert json_schema('{"n": [true]}', '{"n": [1]}', anything) == 0.0
    assert json_schema('{"n": [1], "m": 2}', '{"n": [1]}', anything) == 0.0


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1e999", "NaN", "-Infinity"])
def test_numbers_that_no_float_holds_are_scored_and_no_error(number: str) -> None:
    """Such a reply would end its episode as an infrastructure failure, which is not trained."""
    schema = {"properties": {"n": {"multipleOf": 0.5}}}
    assert json_schema(f'{{"n": {number}}}', schema) == 0.0
    assert json_schema("NaN", True) == json_schema("[Infinity]", True) == 0.0
    test = ProgramTest("", "", 1.0, is_text=False)
    assert not test.passes(f"tailrace-result:{number}")
    assert not test.passes("tailrace-result:true")
    assert test._replace(expected=float("inf")).passes("tailrace-result:Infinity")
    assert not test._replace(expected=float("nan")).passes("tailrace-result:NaN")


def test_labels_of_options_are_letters_of_either_case() -> None:
    for choices in (
        {"a": "Berlin", "b": "Paris"},
        {"text": ["Berlin", "Paris"], "label": ["(a)", "(b)"]},
    ):
        for truth in ("b", "B", 1, "Paris"):
            assert mcq("Answer: B", truth, {"choices": choices}) == 1.0
            assert mcq(r"\boxed{b}", truth, {"choices": choices}) == 1.0
            assert mcq("Answer: A", truth, {"choices": choices}) == 0.0


def test_a_schema_is_never_fetched() -> None:
    schema = {"$ref": "https://schemas.example/x.json"}
    with pytest.raises(Unresolvable):
        json_schema("{}", None, {"json_schema": schema})


def test_a_pattern_that_a_reply_makes_slow_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MAX_CPU_S", 0.2)
    schema = {"type": "string", "pattern": "^(a+)+$"}
    assert json_schema(json.dumps("a" * 40 + "b"), schema) == 0.0


def run(test: ProgramTest) -> bool:
    """Runs a test as the sandbox does: source, standard input, standard output."""
    argv = [sys.executable, "-c", test.code]
    ended = subprocess.run(argv, input=test.stdin, capture_output=True, text=True, timeout=60)
    return ended.returncode == 0 and test.passes(ended.stdout)


def passes(program: str, row: dict[str, Any]) -> list[bool]:
    return [run(test) for test in program_tests(f"```python\n{program}\n```", row, 10)]


IO_ROW = {"tests": json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})}
FUNCTION_ROW = {
    "reward_model": {
        "ground_truth": {"fn_name": "add", "inputs": [[1, 2], "3\n4"], "outputs": [3, "7"]}
    }
}
SOLUTION = """from __future__ import annotations
class Solution:
    @lru_cache
    def add(self, a: List[int], b: Optional[int]) -> int:
        return reduce(operator.add, deque([a, b])) + 0 * Counter()[inf]
"""
GCD_ROW = {"tests": {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}}
ASSERT_ROW = {"test_list": ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]}
HUMANEVAL_ROW = {
    "prompt": "import math\n\ndef add(a, b):\n",
    "entry_point": "add",
    "test": "def check(f):\n    assert f(1, 2) == 3\n",
}


@pytest.mark.parametrize(
    ("row", "program", "expected"),
    [
        (IO_ROW, "a, b = map(int, input().split())\nprint(a + b)", [True, True]),
        (IO_ROW, "print(3)", [True, False]),
        (FUNCTION_ROW, "def add(a, b):\n    return a + b", [True, True]),
        (FUNCTION_ROW, "class Solution:\n    def add(self, a, b):\n        return a + b", [True, True]),
        (FUNCTION_ROW, "def add(a, b):\n    return 3", [True, False]),
        (FUNCTION_ROW, SOLUTION, [True, True]),
        (GCD_ROW, "pass", [False]),
        (GCD_ROW, "import math\ngcd = math.gcd", [True]),
        (
            IO_ROW,
            "from __future__ import annotations\nprint(floor(sum(map(int, input().split()))))",
            [True, True],
        ),
        (ASSERT_ROW, "def add(a, b):\n    return a + b", [True, True]),
        (ASSERT_ROW, "def add(a, b):\n    return 3", [True, False]),
        (HUMANEVAL_ROW, "    return a + b", [True]),
        (HUMANEVAL_ROW, "def add(a, b):\n    return math.floor(a + b)", [True]),
        (HUMANEVAL_ROW, "def add(a, b):\n    return 0", [False]),
    ],
)
def test_programs_pass_and_fail_their_tests(
    row: dict[str, Any], program: str, expected: list[bool]
) -> None:
    assert passes(program, row) == expected


@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit(0)",
        "import sys\nsys.exit(0)",
        "print('tailrace-result:0')\nraise SystemExit",
        "print('\\ntailrace-result:true')\nraise SystemExit",
        "def add(a, b):\n    raise SystemExit(0)",
        "class Any:\n    pass\ndef add(a, b):\n    return None",
        "import sys\nprint('\\ntailrace-result:' + sys.stdin.read().split('\\n')[0])\nsys.exit()",
        "import os\nos.write(1, b'\\ntailrace-result:' + os.read(0, 99).split(b'\\n')[0])\nos._exit(0)",
        "import builtins\nbuiltins.exec = lambda *given: None",
        "import builtins\nbuiltins.compile = lambda *given: 'pass'",
        "import sys\nprint('\\ntailrace-result:' + sys._getframe(1).f_globals['_token'])\nsys.exit()",
    ],
)
def test_programs_cannot_pass_by_ending_early(program: str) -> None:
    for row in (FUNCTION_ROW, ASSERT_ROW, HUMANEVAL_ROW):
        assert not any(passes(program, row))


def test_the_last_program_of_a_reply_counts_and_truths_stay_outside() -> None:
    assert program_of("```python\na\n```\nor\n```py\nb\n```") == "b\n"
    assert program_of("```json\n{}\n```") == program_of("```\nnot closed") == ""
    assert program_of("print(1)") == "print(1)"
    assert program_of("```python\na\n```\nprints\n```\n3\n```") == "a\n"
    assert program_of("```\na\n```\nor\n```\nb\n```") == "b\n"
    assert program_of("1. So:\n\n   ```python\n   if x:\n       y\n   ```") == "if x:\n    y\n"
    assert program_of("So: ```\n    return 1\n```") == "    return 1\n"
    for test in program_tests("print(1)", {**FUNCTION_ROW}, 10):
        assert "7" not in test.code
    assert program_tests("", IO_ROW, 10) == []
    with pytest.raises(NoTruthError, match="no true answer"):
        program_tests("x", {"prompt": "?"}, 10)


@pytest.mark.parametrize(
    "tests",
    [{"inputs": ["1"], "outputs": []}, {"inputs": ["1"]}, [{"input": "1", "expected": "2"}], 5, [5]],
)
def test_tests_of_no_known_form_are_named(tests: Any) -> None:
    with pytest.raises(NoTruthError, match=r"neither \{inputs, outputs\} of one length nor a list"):
        program_tests("x", {"tests": tests}, 10)


def test_a_whole_number_may_be_written_as_a_float() -> None:
    test = ProgramTest("", "", "3\n-10 x", is_text=True)
    assert test.passes("3.0\n-10.00 x\n")
    assert not test.passes("3.5\n-10 x")
    assert not test.passes("3.0.0\n-10 x")
    assert not test.passes("3\n-10 x.0")


def test_blank_lines_of_an_output_do_not_count() -> None:
    row = {"tests": [{"input": "", "output": "1\n2\n"}]}
    assert passes("print(1)\nprint()\nprint(2)", row) == [True]
    assert passes("print(1, 2)", row) == [False]


def test_a_function_with_a_longer_name_is_not_the_one_that_is_asked_for() -> None:
    row = {**HUMANEVAL_ROW, "prompt": "import math\n\ndef add(a, b):\n    return add_all([a, b])\n\n"}
    assert passes("def add_all(some):\n    return sum(some)", row) == [True]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("HuggingFaceH4/MATH-500", "math"),
        ("lighteval/MATH", "math"),
        ("math_dapo", "math"),
        ("HuggingFaceH4/aime_2024", "aime"),
        ("aime25", "aime"),
        ("math-ai/aime24", "aime"),
        ("numina_amc_aime", "math"),
        ("allenai/ai2_arc", "mcq"),
        ("cais/mmlu", "mcq"),
        ("searchR1_nq", "em"),
        ("rajpurkar/squad_v2", "f1"),
        ("openai/openai_humaneval", "code"),
        ("deepmind/code_contests", "code"),
        ("json_schema", "json_schema"),
        ("judge", "judge"),
        ("mine-v2", "f1"),
    ],
)
def test_the_scorer_of_a_data_source(source: str, name: str) -> None:
    assert scorer_for(source, {"mine*": "f1"}) == name
    assert scorer_for(source, {"*": "em"}) == "em"


def test_a_source_that_nobody_knows_is_named_with_the_remedy() -> None:
    with pytest.raises(UnknownSourceError, match=r"'poems'.*`sources`.*gsm8k, aime"):
        scorer_for("poems", {})
    with pytest.raises(UnknownSourceError, match="no data_source"):
        scorer_for("", {})


def test_truths_stand_where_published_rows_have_them() -> None:
    assert truth_of({"reward_model": {"ground_truth": 1}, "answer": 2}) == 1
    assert truth_of({"answer": 2, "solution": 3}) == 2
    with pytest.raises(NoTruthError, match=r"keys prompt"):
        truth_of({"prompt": "?"})


@pytest.mark.parametrize("truth", [{"text": [], "answer_start": []}, {"spans": ["x"]}, [None], [""]])
def test_a_truth_without_any_answer_is_an_error_not_a_zero(truth: Any) -> None:
    for scorer in (em, f1, math):
        with pytest.raises(NoTruthError, match=r"no number and no text.*correct the row"):
            scorer("Answer: x", truth)
    with pytest.raises(NoTruthError):
        check_truth("math", {"answer": truth})


def test_a_missing_alias_is_no_answer() -> None:
    assert em("Answer: None", {"value": "Paris", "aliases": None}) == 0.0
    assert em("Answer: Paris", {"value": "Paris", "aliases": None}) == 1.0


def test_a_scorer_scores_the_last_reply_of_an_episode() -> None:
    messages = [ChatMessage("assistant", "5"), ChatMessage("user", "?"), ChatMessage("assistant", "B")]
    row = {"answer": "B", **CHOICES}
    assert score(EnvTask("t", 0, 0, row), messages, {}, scorer="mcq") == 1.0
    row = {"json_schema": {"const": 4}}
    messages.append(ChatMessage("assistant", "<think>5</think>4"))
    assert score(EnvTask("t", 0, 0, row), messages, {}, scorer="json_schema") == 1.0
    assert {name for name, spec in SCORERS.items() if spec.function is None} == {"code", "judge"}
