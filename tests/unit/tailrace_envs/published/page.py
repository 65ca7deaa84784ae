"""The entries of published environments on the page about environments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

PAGE = Path(__file__).parents[4] / "docs" / "environments.md"


def page_entry(name: str) -> dict[str, Any]:
    """Entry of `agents.custom_envs` that the page shows."""
    (block,) = re.findall(r"```yaml\n(taxi: .*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    entry: dict[str, Any] = yaml.safe_load(block)[name]
    return entry
