"""Data sets: rows that become tasks of agent loops and workflows.

A row is a mapping with the names that such files usually have: `prompt` (text, or a list of messages),
`agent_name` (who plays it), `data_source`, `reward_model: {ground_truth: ...}` or any other keys that
a reward wants, `tools` (names), `tools_kwargs` (by tool). Everything in a row reaches the agent and
the reward function; docs/agents.md tells the whole format.
"""

from tailrace.data.config import DatasetEntry
from tailrace.data.dataset import Dataset, load_dataset
from tailrace.data.rows import Row, prompt_messages

__all__ = ["Dataset", "DatasetEntry", "Row", "load_dataset", "prompt_messages"]
