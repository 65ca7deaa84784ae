"""Configuration of the sandbox: the `sandbox` section of an experiment file."""

from __future__ import annotations

from tailrace.config import Config


class SandboxConfig(Config, frozen=True, kw_only=True):
    """One sandbox process."""
