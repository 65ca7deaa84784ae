"""Configuration of one data set: an entry of `agents.datasets`."""

from typing import Any, Literal

import msgspec

from tailrace.config import Config


class DatasetEntry(Config, frozen=True, kw_only=True):
    """Source of rows, with defaults for keys that rows lack."""

    path: str
    """A file (`rows.jsonl`, `rows.json`, `rows.parquet`), a folder with `<split>.jsonl` (or .json,
    .parquet), a data set of the Hugging Face hub (`openai/gsm8k`), or `module:function` of a Python
    function that yields rows. Paths are relative to the folder where Tailrace was started."""

    format: Literal["auto", "jsonl", "json", "parquet", "hub", "python"] = "auto"
    """Kind of `path`; `auto`: recognized by its form."""

    split: str = "train"
    """Part of a folder or of a hub data set; a Python function gets it as its argument `split`."""

    name: str = ""
    """Configuration of a hub data set, for example `main`."""

    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further keyword arguments of a Python function or of `datasets.load_dataset`."""

    converter: str = ""
    """`module:function` from a row of the source to a row, or to None, which leaves the row out."""

    agent_name: str = ""
    """Agent loop of rows without `agent_name`; empty: `single_turn_agent`."""

    system_prompt: str = ""
    """System message for prompts that have none."""

    tools: tuple[str, ...] = ()
    """Tools of rows without `tools`."""

    tools_kwargs: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    """Arguments that a tool is created with, by tool; rows may set other ones for a tool."""

    limit: int = 0
    """Number of rows to use, from the start; 0: all."""

    max_tokens_per_step: int = 0
    """Maximum number of tokens of one reply; 0: the rest of the episode's budget."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path must not be empty")
        if self.limit < 0 or self.max_tokens_per_step < 0:
            raise ValueError("limit and max_tokens_per_step must not be negative")
