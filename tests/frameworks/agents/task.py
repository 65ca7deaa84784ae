"""The task that every framework's agent plays: double 21 with a tool, double the result, say it."""

SYSTEM = "Answer in digits."
ANSWER = "84"


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: What to double.
    """
    return 2 * number


SCHEMA = {
    "name": "double",
    "description": "Twice a number.",
    "parameters": {
        "type": "object",
        "properties": {"number": {"type": "integer"}},
        "required": ["number"],
    },
}


def reward(answer: object) -> float:
    """1 for the right answer."""
    return float(ANSWER in str(answer))
