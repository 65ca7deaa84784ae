"""Configuration of one data set: an entry of `agents.datasets`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tailrace.config import Config


class DatasetEntry(Config, frozen=True, kw_only=True):
    """Where rows come from, and what is added to those that do not say it themselves."""

    path: str
    """A file (`rows.jsonl`, `rows.json`, `rows.parquet`), a folder that holds `<split>.jsonl` or the
    like, a data set of the Hugging Face hub (`openai/gsm8k`), or `module:function` of a Python function
    that yields rows. Paths are relative to the folder where Tailrace was started."""

    format: Literal["auto", "jsonl", "json", "parquet", "hub", "python"] = "auto"
    """What `path` is; `auto` sees it by its form."""

    split: str = "train"
    """Part of a folder or of a hub data set; a Python function gets it as its argument `split`."""

    name: str = ""
    """Configuration of a hub data set, for example `main`."""

    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further keyword arguments of a Python function or of `datasets.load_dataset`."""

    converter: str = ""
    """`module:function` that makes a row of a row of the source, or None to leave it out."""

    agent_name: str = ""
    """Agent loop of rows that name none; empty: `single_turn_agent`."""

    system_prompt: str = ""
    """A system message before the prompt of rows whose prompt has none."""

    tools: tuple[str, ...] = ()
    """Tools of rows that name none."""

    tools_kwargs: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    """What a tool is created with, by tool, in rows that say nothing about that tool."""

    limit: int = 0
    """Use only so many rows, from the start; 0: all."""

    max_tokens_per_step: int = 0
    """Tokens that one reply may have; 0: what is left of the episode's budget."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path must not be empty")
        if self.limit < 0 or self.max_tokens_per_step < 0:
            raise ValueError("limit and max_tokens_per_step must not be negative")
