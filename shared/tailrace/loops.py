"""Redirects `tailrace.loops` to the loops of the agents service, `tailrace_agents.core.loops`."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("tailrace_agents.core.loops"), name)
