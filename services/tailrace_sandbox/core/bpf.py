"""A system call filter as a classic BPF program: the kernel's `struct sock_filter[]`, as bytes.

The program compares the architecture, then finds the call's number in a balanced tree (the kernel
interprets it once per number at installation, so depth is what a confined call pays), then looks at
arguments where a rule does. Arguments are compared by their low 32 bits: every argument a rule looks at
is an `int` or a flag word to the kernel, which ignores the rest.
"""

import struct
from collections.abc import Mapping
from typing import NamedTuple, Union

_LOAD, _AND, _RETURN, _JUMP = 0x20, 0x54, 0x06, 0x05
_IF_EQUAL, _IF_AT_LEAST = 0x15, 0x35
_NUMBER_AT, _ARCH_AT, _ARGS_AT = 0, 4, 16
_X32_BIT = 0x40000000

ALLOW = 0x7FFF0000
KILL = 0x80000000
ASK = 0x7FC00000  # the listener of the filter decides
_ERRNO = 0x00050000


def refuse(errno: int) -> int:
    """The verdict that fails the call with `errno`; with 0 the call does nothing and succeeds."""
    return _ERRNO | errno


class Compare(NamedTuple):
    """True if `arguments[argument] & mask == value` (or, negated, if it is not)."""

    argument: int
    value: int
    mask: int = 0xFFFFFFFF
    negated: bool = False


class Rule(NamedTuple):
    """`verdict` if all tests of one of the `cases` hold; otherwise `otherwise`, which may be a rule."""

    cases: tuple[tuple[Compare, ...], ...]
    otherwise: "Verdict"
    verdict: int = ALLOW


Verdict = Union[int, Rule]  # noqa: UP007 - also runs on the interpreter of another Python


class _Program:
    """Instructions with symbolic jump targets; conditions jump when true and fall through when not."""

    def __init__(self) -> None:
        self._code: list[tuple[int, int, str]] = []
        self._labels: dict[str, int] = {}

    def mark(self, label: str) -> None:
        self._labels[label] = len(self._code)

    def put(self, code: int, value: int) -> None:
        self._code.append((code, value, ""))

    def jump(self, label: str) -> None:
        self._code.append((_JUMP, 0, label))

    def when(self, condition: int, value: int, label: str) -> None:
        """Go to `label` if the accumulator compares so.

        It takes a pair of instructions, since conditional jumps reach no further than 255.
        """
        self.put(condition, value)
        self.jump(label)

    def to_bytes(self) -> bytes:
        packed = []
        for place, (code, value, label) in enumerate(self._code):
            skip_pair = (0, 1) if code in (_IF_EQUAL, _IF_AT_LEAST) else (0, 0)
            operand = self._labels[label] - place - 1 if label else value
            packed.append(struct.pack("=HBBI", code, *skip_pair, operand))
        return b"".join(packed)


def assemble(arch: int, verdicts: Mapping[int, Verdict], default: int) -> bytes:
    """The program for calls by number; numbers without a verdict get `default`.

    A call of another architecture, or of x86's 32-bit variant, kills the process.
    """
    program = _Program()
    program.put(_LOAD, _ARCH_AT)
    program.when(_IF_EQUAL, arch, "number")
    program.put(_RETURN, KILL)
    program.mark("number")
    program.put(_LOAD, _NUMBER_AT)
    program.when(_IF_AT_LEAST, _X32_BIT, "kill")
    rules: dict[str, Verdict] = {"default": default, "kill": KILL}
    _search(program, _ranges(verdicts, rules))
    for label, verdict in rules.items():
        program.mark(label)
        _decide(program, label, verdict)
    return program.to_bytes()


def _ranges(verdicts: Mapping[int, Verdict], rules: dict[str, Verdict]) -> list[tuple[int, str]]:
    """`(first number, label)` of each stretch of numbers with one verdict; fills `rules` by label."""
    labels: dict[Verdict, str] = {verdict: label for label, verdict in rules.items()}
    ranges = [(0, "default")]
    for number in range(max(verdicts) + 2):
        verdict = verdicts.get(number, rules["default"])
        label = labels.setdefault(verdict, f"verdict{len(labels)}")
        rules[label] = verdict
        if label != ranges[-1][1]:
            ranges.append((number, label))
    return ranges


def _search(program: _Program, ranges: list[tuple[int, str]], name: str = "tree") -> None:
    """Jump to the label of the last range that begins at or before the number."""
    if len(ranges) == 1:
        program.jump(ranges[0][1])
        return
    middle = len(ranges) // 2
    program.when(_IF_AT_LEAST, ranges[middle][0], f"{name}R")
    _search(program, ranges[:middle], f"{name}L")
    program.mark(f"{name}R")
    _search(program, ranges[middle:], f"{name}R")


def _decide(program: _Program, label: str, verdict: Verdict) -> None:
    if isinstance(verdict, int):
        program.put(_RETURN, verdict)
        return
    for number, case in enumerate(verdict.cases):
        next_case = f"{label}.{number + 1}"
        for place, test in enumerate(case):
            _check(program, test, f"{label}.{number}.{place}", next_case)
        program.put(_RETURN, verdict.verdict)
        program.mark(next_case)
    _decide(program, f"{label}.else", verdict.otherwise)


def _check(program: _Program, test: Compare, label: str, failed: str) -> None:
    """Fall through if `test` holds, else go to `failed`."""
    program.put(_LOAD, _ARGS_AT + 8 * test.argument)
    program.put(_AND, test.mask)
    if test.negated:
        program.when(_IF_EQUAL, test.value, failed)
        return
    program.when(_IF_EQUAL, test.value, f"{label}.holds")
    program.jump(failed)
    program.mark(f"{label}.holds")
