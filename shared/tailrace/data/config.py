"""Configuration of one data set: an entry of `agents.datasets`."""

import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from tailrace.config import Config
from tailrace.import_path import looks_like_path

SUFFIXES = {".jsonl": "jsonl", ".json": "json", ".parquet": "parquet"}


class DatasetEntry(Config, frozen=True, kw_only=True):
    """Source of rows, with defaults for keys that rows lack."""

    path: str
    """A file (`rows.jsonl`, `rows.json`, `rows.parquet`), a folder with `<split>.jsonl` (or .json,
    .parquet, or parts like `<split>-00000-of-00002.parquet`, also in its folders `data` and `name`), a
    data set of the Hugging Face hub (`openai/gsm8k`), or `module:function` of a Python function that
    yields rows. Paths are relative to the folder where Tailrace was started."""

    format: Literal["auto", "jsonl", "json", "parquet", "hub", "python"] = "auto"
    """Kind of `path`; `auto`: recognized by its form."""

    split: str = "train"
    """Part of a folder or of a hub data set; a Python function gets it as its argument `split`."""

    name: str = ""
    """Configuration of a hub data set, for example `main`."""

    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further keyword arguments of a Python function or of `datasets.load_dataset`."""

    columns: dict[str, str] = msgspec.field(default_factory=dict)
    """Column of the source for each key of a row, for example `{prompt: question}`; dots lead into
    objects (`extra_info.answer`). Other columns keep their names."""

    instruction: str = ""
    """Text below the prompt's last message of the user, for example on the form of the answer."""

    data_source: str = ""
    """Data source of rows without `data_source`, by which built-in scorers are chosen. Empty: `path` of
    a hub data set."""

    converter: str = ""
    """`module:function` from a row of the source, with `columns` named, to a row, or to None, which
    leaves the row out."""

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

    @property
    def is_hub(self) -> bool:
        """True if `path` names a data set of the hub."""
        if self.format != "auto":
            return self.format == "hub"
        path = Path(os.path.expanduser(self.path))
        return (
            not looks_like_path(self.path)
            and ":" not in self.path
            and path.suffix not in SUFFIXES
            and not path.is_dir()
        )

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path must not be empty")
        if self.limit < 0 or self.max_tokens_per_step < 0:
            raise ValueError("limit and max_tokens_per_step must not be negative")
