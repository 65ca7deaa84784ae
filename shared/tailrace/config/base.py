"""The base of configuration Structs, and the error of a user's mistake in one."""

from __future__ import annotations

import msgspec


class ConfigError(ValueError):
    """The user's configuration is wrong; the message names the key, the file and the remedy."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every configuration Struct. `frozen` and `forbid_unknown_fields` are inherited."""
