"""Settings by the names that this field knows: roles (`actor_train`, ...) and keys at the top level.

Owns the table from those names to the one key that a service reads, and its application when an
experiment is loaded. Invariants: a setting has one meaning, so that its two names together are an error
that names both; a name without meaning here is refused with the remedy, never ignored; applying the
table to its own result changes nothing.
"""

from __future__ import annotations

from tailrace.config.settings.apply import Applied, apply_settings
from tailrace.config.settings.setting import Choice, Derived, Refused, Renamed, Setting
from tailrace.config.settings.table import ROOTS, TABLES

__all__ = [
    "ROOTS",
    "TABLES",
    "Applied",
    "Choice",
    "Derived",
    "Refused",
    "Renamed",
    "Setting",
    "apply_settings",
]
