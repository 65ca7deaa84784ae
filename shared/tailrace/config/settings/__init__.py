"""Settings of an experiment by the names of the field: roles (`actor_train`, ...) and top-level keys.

Owns the engine that applies tables of rules, the tables for these names, and their application when an
experiment is loaded. Invariants: a setting has one meaning, so that two names of it together are an
error that names both; a name without meaning here is refused with the remedy, never ignored; applying
the tables to their own result changes nothing.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from tailrace.config.base import InvalidConfigError
from tailrace.config.settings.engine import (
    Applied,
    RuleTable,
    apply,
    set_at,
    value_at,
)
from tailrace.config.settings.rules import (
    Derived,
    Lookup,
    NoEffectError,
    Refused,
    Renamed,
    Rule,
    ValueNames,
    same,
    value_names,
)
from tailrace.config.settings.tables import ROOTS, RULES, TABLES

__all__ = [
    "ROOTS",
    "TABLES",
    "Applied",
    "Derived",
    "Lookup",
    "NoEffectError",
    "Refused",
    "Renamed",
    "Rule",
    "RuleTable",
    "ValueNames",
    "apply",
    "apply_settings",
    "same",
    "set_at",
    "value_at",
    "value_names",
]

_ROLES = RuleTable(RULES, closed=True)


def apply_settings(
    content: Mapping[str, Any], source: str, rules: Sequence[Rule] | None = None
) -> Applied:
    """Returns `content` with every setting of the tables under the key that a service reads.

    Raises `InvalidConfigError`, which names every wrong setting, `source` and the remedies.
    """
    table = _ROLES if rules is None else RuleTable(rules, closed=True)
    roots = set(table.keys_below(""))
    kept = {key: copy.deepcopy(content[key]) for key in content if key not in roots}
    applied = apply(table, {key: content[key] for key in content if key in roots}, onto=kept)
    problems = [f"unknown key {name!r}; {reason}" for name, reason in applied.unknown.items()]
    problems += [f"{name}: {problem.reason}" for name, problem in applied.problems.items()]
    if problems:
        raise InvalidConfigError(source, problems)
    return applied
