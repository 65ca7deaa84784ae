"""Keys of environments that an imported experiment may have: those that their types take."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tailrace.config.settings.setting import Lookup
from tailrace.config.suggestions import not_one_of
from tailrace_envs import env_config_kind

_KEY = re.compile(r"agents\.custom_envs\.(.+)\.env_config\.([^.]+)")


def check_environment_key(key: str, value: Any, lookup: Lookup) -> None:
    """Raise `ValueError` where our dotted `key` is one of `env_config` that its type does not take.

    What a type takes together is seen when the whole experiment is checked; types that are none of ours
    are the user's, and so are their keys.
    """
    found = _KEY.fullmatch(key)
    env_type = lookup(f"agents.custom_envs.{found.group(1)}.env_type") if found else None
    kind = env_config_kind(str(env_type))
    if found is None or kind is None:
        return
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    name = found.group(2)
    if name not in fields:
        raise ValueError(f"env_type {env_type}: {not_one_of(repr(name), fields)}")
    try:
        msgspec.convert(value, fields[name])
    except msgspec.ValidationError as error:
        raise ValueError(f"env_type {env_type}: {name}: {error}") from error
