"""GSM8K: rows from questions with worked answers, and a reward that compares the final numbers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from math_verify import parse, verify

from tailrace.sdk import reward
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import EnvTask

logging.getLogger("math_verify").setLevel(logging.ERROR)  # `correct` needs no warning

INSTRUCTION = "Think step by step. Put your final answer, a single number, in \\boxed{}."
TOOL_INSTRUCTION = (
    "Think step by step and use the calculator for all arithmetic. "
    "Put your final answer, a single number, in \\boxed{}."
)


def single_turn_row(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a row for one answer."""
    return _row(raw, INSTRUCTION, "single_turn_agent")


def calculator_row(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a row for an answer with the help of a calculator."""
    return {**_row(raw, TOOL_INSTRUCTION, "tool_agent"), "tools": ["calculator"]}


@reward
def correct(task: EnvTask, messages: Sequence[ChatMessage], metrics: Mapping[str, float]) -> float:
    """1 if the number of the last reply equals that of the data set, else 0."""
    said = messages[-1].content.rpartition("####")[2]
    # Both time limits off: they need signals, and the reward service has a limit of its own.
    truth = parse(task.row["reward_model"]["ground_truth"], parsing_timeout=None)
    return float(verify(truth, parse(said, parsing_timeout=None), timeout_seconds=None))


@reward
def chatter(task: EnvTask, messages: Sequence[ChatMessage], metrics: Mapping[str, float]) -> float:
    """Minus the share of non-digits in the last reply: even random weights can learn from it."""
    said = messages[-1].content
    return -sum(not char.isdigit() for char in said) / len(said) if said else -1.0


def _row(raw: Mapping[str, Any], instruction: str, agent_name: str) -> dict[str, Any]:
    solution, mark, number = raw["answer"].rpartition("####")
    if not mark:
        raise ValueError("key 'answer' has no line '#### number'")
    return {
        "prompt": f"{raw['question'].strip()}\n\n{instruction}",
        "agent_name": agent_name,
        "data_source": "openai/gsm8k",
        "reward_model": {"ground_truth": number.strip().replace(",", "")},
        "solution": solution.strip(),
    }
