"""`calculator`: exact arithmetic for models.

It parses an expression as Python syntax of numbers and operators, and never executes it. Sizes are
limited, so each expression is fast.
"""

import ast
import operator
import re
from collections.abc import Callable
from decimal import Decimal, Inexact, localcontext
from fractions import Fraction

from tailrace.sdk.tool import tool

_MAX_CHARS = 200
_MAX_EXPONENT = 64
_MAX_BITS = 4096
_NUM_DIGITS, _MAX_EXACT_DIGITS = 10, 30

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


@tool(is_idempotent=True, timeout_s=5.0)
async def calculator(expression: str) -> str:
    """Compute an arithmetic expression, for example "3 * (17 + 4) / 2".

    Args:
        expression: Numbers and the operators + - * / // % ** and parentheses.
    """
    return calculate(expression)


def calculate(expression: str) -> str:
    """Returns the value as text; `ValueError` names an invalid expression."""
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"expressions have at most {_MAX_CHARS} characters")
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", expression.strip())  # 12,500 is one number
    try:
        tree = ast.parse(plain, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    try:
        return _text(_value(tree.body))
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() as number):
            return Fraction(number)
        case ast.Constant(value=float() as number):
            return Fraction(str(number))
        case ast.UnaryOp(op=sign) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_value(node.operand))
        case ast.BinOp(op=ast.Pow()):
            return _power(_value(node.left), _value(node.right))
        case ast.BinOp(op=sign) if type(sign) in _BINARY:
            return _bounded(_BINARY[type(sign)](_value(node.left), _value(node.right)))
    raise ValueError(f"cannot compute {ast.unparse(node)!r}: only numbers and + - * / // % ** ( )")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > _MAX_EXPONENT:
        raise ValueError(f"exponents are whole numbers from -{_MAX_EXPONENT} to {_MAX_EXPONENT}")
    return _bounded(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > _MAX_BITS:
        raise ValueError("the numbers get too long")
    return value


def _text(value: Fraction) -> str:
    """A whole number or a short decimal exactly, any other value with `_NUM_DIGITS` digits."""
    if value.denominator == 1:
        return str(value.numerator)
    with localcontext(prec=_MAX_EXACT_DIGITS) as context:
        found = Decimal(value.numerator) / Decimal(value.denominator)
        num_digits = _NUM_DIGITS if context.flags[Inexact] else _MAX_EXACT_DIGITS
        return f"{found:.{num_digits}g}"
