"""The base of configuration Structs, and the errors for mistakes in a configuration."""

from collections.abc import Sequence

import msgspec


class ConfigError(ValueError):
    """The user's configuration is wrong; the message names the key, the file and the remedy."""


class InvalidConfigError(ConfigError):
    """Everything that is wrong with one file. Attributes: `source`, and `problems`, a line for each."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        several = "".join(f"\n  {problem}" for problem in self.problems)
        found = self.problems[0] if len(self.problems) == 1 else f"{len(problems)} problems:{several}"
        super().__init__(f"{source}: {found}")


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every configuration Struct. Subclasses inherit `frozen` and `forbid_unknown_fields`."""
