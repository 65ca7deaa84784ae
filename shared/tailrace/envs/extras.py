"""Packages that only some environments need."""

from __future__ import annotations

from tailrace.config import ConfigError


def missing_package(env_type: str, package: str, extra: str, error: ImportError) -> ConfigError:
    """The error for an environment whose package is not installed, or does not import."""
    return ConfigError(
        f"env_type {env_type!r} needs the package {package} ({error}): pip install 'tailrace[{extra}]'"
    )
