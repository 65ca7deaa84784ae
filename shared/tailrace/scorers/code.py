"""Tests of programs: what a sandbox runs, and the verdict on its output.

Invariant: expected outputs stay outside of the sandbox. `assert` tests cannot: they run beside the
reply's code, and print at their end a number that this code finds in no stream or name. It can still
search the interpreter for them, or return objects that equal everything.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tailrace.scorers.answers import NoTruthError, truth_of

TEST_KEYS = ("tests", "test_cases", "input_output", "test_list", "test")

_FENCE = re.compile(r"(^[ \t]++)?+```[ \t]*+([\w+-]*+)[^\n`]*+\n(.*?)```", re.DOTALL | re.MULTILINE)
_PYTHON = frozenset({"", "python", "py", "python3"})
_MARK = "tailrace-result:"
_TOLERANCE = 1e-6
_WHOLE = re.compile(r"([-+]?\d+)\.0+")
_FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)
_IMPORTS = """
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from typing import *
from string import *
from random import *
from collections import *
from copy import *
from bisect import *
from functools import *
from heapq import *
from itertools import *
from math import *
from builtins import *
"""
_CALL = """
import json as _json, sys as _sys
_made = {name}
_function = getattr(_made(), {method!r}) if isinstance(_made, type) else _made
_result = _function(*_json.loads(_sys.stdin.read()))
print("\\n{mark}" + _json.dumps(_result))
"""
_ASSERTS = """
import os, sys
def _run(code, compile, exec, out, write):
    token, _, tests = sys.stdin.read().partition("\\n")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    names = {{"__name__": "solution"}}
    exec(compile(code, "solution.py", "exec"), names)
    exec(compile(tests, "tests.py", "exec"), names)
    out.flush()
    write(1, ("\\n{mark}" + token).encode())
_run({code!r}, compile, exec, sys.stdout, os.write)
"""


class ProgramTest(NamedTuple):
    """One run: `code` with `stdin`; `expected` is compared with what it prints."""

    code: str
    stdin: str
    expected: Any
    is_text: bool  # False: with the JSON behind the mark, which functions' results have

    @property
    def least_output(self) -> int:
        """Number of characters that an output needs to pass."""
        return len(str(self.expected).strip() if self.is_text else json.dumps(self.expected))

    def passes(self, stdout: str) -> bool:
        """Tells whether the output is the expected one."""
        if self.is_text:
            return _same_output(stdout, str(self.expected))
        _, mark, found = stdout.rpartition(_MARK)
        try:
            return bool(mark) and _same_value(json.loads(found), self.expected)
        except (ValueError, OverflowError, RecursionError):  # no JSON, or a number that no float holds
            return False


def program_of(reply: str) -> str:
    """Last Python block of a reply; the whole reply if it has no block at all."""
    blocks = _FENCE.findall(reply)
    if not blocks and "```" not in reply:
        return reply
    programs = [block for block in blocks if block[1].lower() in _PYTHON]
    if not programs:
        return ""
    named = [block for block in programs if block[1]]  # one without a name may be an output
    indent, _, code = (named or programs)[-1]
    return re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)  # of a fence in a list


def program_tests(reply: str, row: Mapping[str, Any], max_tests: int) -> list[ProgramTest]:
    """Runs that a reply has to pass; none for a reply without a program.

    The row's tests are `{inputs, outputs}` (standard input and output; with `fn_name`, arguments and
    results of a function), a list of `{input, output}`, or Python with `assert`s (with `entry_point`: a
    function `check` that is called with it).
    """
    code = program_of(reply)
    tests = _tests_of(row)
    if isinstance(tests, str) or (
        isinstance(tests, list) and all(isinstance(one, str) for one in tests)
    ):
        made = _assertions(code, tests, row)
    else:
        made = _examples(code, tests, row)
    if not made:
        raise NoTruthError("the row has no tests: name their column `tests` (docs/scorers.md: forms)")
    return made[:max_tests] if code.strip() else []


def _tests_of(row: Mapping[str, Any]) -> Any:
    given = next((row[key] for key in TEST_KEYS if row.get(key) is not None), None)
    given = truth_of(row) if given is None else given
    if isinstance(given, str):
        try:
            return json.loads(given)
        except ValueError:
            return given
    return given


def _assertions(code: str, tests: str | Sequence[str], row: Mapping[str, Any]) -> list[ProgramTest]:
    sources = [tests] if isinstance(tests, str) else list(tests)
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
    entry = row.get("entry_point")
    made = []
    for source in sources:
        called = f"\ncheck({entry})" if entry and "def check" in source else ""
        token = secrets.token_hex(8)
        program = _ASSERTS.format(code=_completed(code, row), mark=_MARK)
        made.append(
            ProgramTest(program, f'"{token}"\n{setup}\n{source}{called}\n', token, is_text=False)
        )
    return made


def _completed(code: str, row: Mapping[str, Any]) -> str:
    """The reply's function, below the imports of a prompt that is the start of a program."""
    prompt, entry = row.get("prompt"), row.get("entry_point")
    if not entry or not isinstance(prompt, str):
        return code
    if not re.search(rf"\bdef {re.escape(str(entry))}\b", code):
        return prompt + code
    return "\n".join(re.findall(r"^(?:import|from) .*$", prompt, re.MULTILINE)) + "\n" + code


def _examples(code: str, tests: Any, row: Mapping[str, Any]) -> list[ProgramTest]:
    name = row.get("fn_name") or (tests.get("fn_name") if isinstance(tests, Mapping) else None)
    try:
        if isinstance(tests, Mapping):
            pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
        else:
            pairs = [(one["input"], one["output"]) for one in tests]
    except (LookupError, TypeError, ValueError) as error:
        raise NoTruthError(
            "the row's tests are neither {inputs, outputs} of one length nor a list of {input, output} "
            f"({type(error).__name__}: {error}): convert them (docs/scorers.md: forms)"
        ) from error
    if not name:
        code = _importing(code)
        return [ProgramTest(code, _text(given), _text(wanted), is_text=True) for given, wanted in pairs]
    return [_function_test(code, name, given, wanted) for given, wanted in pairs]


def _function_test(code: str, name: str, given: Any, wanted: Any) -> ProgramTest:
    made, _, method = name.partition(".") if "." in name else (name, "", name)
    if (
        "." not in name
        and "class Solution" in code
        and not re.search(rf"^def {name}\b", code, re.MULTILINE)
    ):
        made = "Solution"
    harness = _CALL.format(name=made, method=method, mark=_MARK)
    arguments = [_json(line) for line in given.splitlines()] if isinstance(given, str) else given
    if not isinstance(arguments, list | tuple):
        arguments = [arguments]
    expected = _json(wanted) if isinstance(wanted, str) else wanted
    program = f"{_importing(code, made)}\n{harness}"
    return ProgramTest(program, json.dumps(arguments), expected, is_text=False)


def _importing(code: str, own: str = "") -> str:
    """Code below the imports that the graders of contests make, of which none gives it `own`."""
    futures = "".join(_FUTURE.findall(code))
    hidden = f"globals().pop({own!r}, None)\n" if own else ""
    return f"{futures}{_IMPORTS}{hidden}{_FUTURE.sub('', code)}"


def _text(lines: Any) -> str:
    return "\n".join(map(str, lines)) if isinstance(lines, list | tuple) else str(lines)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _same_output(found: str, wanted: str) -> bool:
    """Tells whether the words of all lines are the same; blank lines do not count."""
    ours = [words for line in found.splitlines() if (words := line.split())]
    theirs = [words for line in wanted.splitlines() if (words := line.split())]
    if ours == theirs:
        return True
    return [len(line) for line in ours] == [len(line) for line in theirs] and all(
        _same_word(one, other)
        for our, their in zip(ours, theirs, strict=True)
        for one, other in zip(our, their, strict=True)
    )


def _same_word(found: str, wanted: str) -> bool:
    if found == wanted:
        return True
    if "." not in wanted:
        whole = _WHOLE.fullmatch(found)
        return whole is not None and whole[1] == wanted
    try:
        return _same_value(float(found), float(wanted))
    except ValueError:
        return False


def _same_value(found: Any, wanted: Any) -> bool:
    """Equal values; floats within a tolerance; `[x]` accepts x too, as some sets write it."""
    match found, wanted:
        case int() | float(), float() if not isinstance(found, bool):
            return found == wanted or abs(found - wanted) <= _TOLERANCE * max(1.0, abs(wanted))
        case list(), list() if len(found) == len(wanted):
            return all(map(_same_value, found, wanted))
        case _, list() if len(wanted) == 1 and found == wanted[0]:
            return True
    return bool(found == wanted) and isinstance(found, bool) == isinstance(wanted, bool)
