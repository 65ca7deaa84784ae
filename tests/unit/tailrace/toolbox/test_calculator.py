"""The calculator that comes with Tailrace."""

from __future__ import annotations

import pytest

from tailrace.toolbox.calculator import calculate, calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        ("-7 // 2", "-4"),
        ("0.1+0.2", "0.3"),
        ("1/3", "0.3333333333"),
        ("10/4*2", "5"),
        ("12,500 * 2", "25000"),
        ("2**10", "1024"),
        ("2**-2", "0.25"),
        ("7 % 4", "3"),
        ("12345678901.5 + 1", "12345678902.5"),
        ("0.1 * 0.000001", "1e-7"),
        ("2/3 * 10**12", "6.666666667e+11"),
        ("10**64 * 10**64 * 10**64 * 10**64 * 10**64 / 3", "3.333333333e+319"),
    ],
)
def test_arithmetic_is_exact(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("1/0", "division by zero"),
        ("2+", "no arithmetic expression"),
        ("__import__('os')", "only numbers"),
        ("True+1", "only numbers"),
        ("x", "only numbers"),
        ("9**9**9", "exponents"),
        ("9**64**1**1*9**64*9**64*9**64*9**64*9**64*9**64*9**64*9**64*9**64*9**64*9**64*9**64*9**64*9**64"
         "*9**64*9**64*9**64*9**64*9**64*9**64", "too long"),
        ("1" * 201, "at most 200 characters"),
    ],
)  # fmt: skip
def test_what_is_no_small_arithmetic_is_refused(expression: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        calculate(expression)


def test_a_model_is_told_what_it_takes() -> None:
    schema = calculator.spec.schema
    assert schema.name == "calculator"
    assert schema.parameters["required"] == ["expression"]
