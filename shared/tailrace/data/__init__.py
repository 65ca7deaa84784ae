"""Data sets: rows that become tasks of agent loops and workflows.

A row is a mapping with the usual key names of such files: `prompt` (text, or a list of messages),
`agent_name` (agent loop that plays the row), `data_source`, `reward_model: {ground_truth: ...}` or any
other keys for a reward, `tools` (names), `tools_kwargs` (by tool). The agent and the reward function
get the whole row; docs/agents.md describes the format.
"""

from tailrace.data.config import DatasetEntry
from tailrace.data.prompts import prompt_messages
from tailrace.data.rows import Row
from tailrace.data.sources import Dataset, first_rows, load_dataset, source_baselines

__all__ = [
    "Dataset",
    "DatasetEntry",
    "Row",
    "first_rows",
    "load_dataset",
    "prompt_messages",
    "source_baselines",
]
