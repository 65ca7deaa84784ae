"""Lua scripts of the store, each with the shared prelude in front."""

import hashlib
import re
from importlib.resources import files
from typing import NamedTuple

_FOLDER = files("tailrace.store") / "lua"


_FUNCTION = re.compile(r"^local function (\w+)\(.*?^end$", re.MULTILINE | re.DOTALL)
_KEY = re.compile(r"\bP \.\. '(\w+:?)'")
_COMMAND = re.compile(r"redis\.p?call\('(INFO', '\w+|\w+)'")  # of INFO one section alone


class Script(NamedTuple):
    """Script with its source and its digest in Redis, and what its caller must be allowed to do."""

    name: str
    source: str
    digest: str
    keys: frozenset[str]  # below the run's prefix, as patterns
    commands: frozenset[str]


def _load(name: str) -> Script:
    prelude, own = ((_FOLDER / f"{part}.lua").read_text(encoding="utf-8") for part in ("prelude", name))
    source = prelude + own
    functions = {found[1]: found[0] for found in _FUNCTION.finditer(prelude)}
    used = own + "".join(text for name, text in functions.items() if f"{name}(" in own)
    keys = {f"{key}*" if key.endswith(":") else key for key in _KEY.findall(used)}
    commands = {command.lower().replace("', '", "|") for command in _COMMAND.findall(used)}
    digest = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    return Script(name, source, digest, frozenset(keys), frozenset(commands))


RECORD_GROUP = _load("record_group")
BEGIN_GROUPS = _load("begin_groups")
SETTLE_MEMBERS = _load("settle_members")
RAISE_ATTEMPT = _load("raise_attempt")
ABANDON_GROUP = _load("abandon_group")
FORGET_GROUP = _load("forget_group")
GROUP_IDS = _load("group_ids")
TAKE_READY = _load("take_ready")
RELEASE_READY = _load("release_ready")
REBASE_CREDIT = _load("rebase_credit")
EMIT_EVENTS = _load("emit_events")
READ_OUTBOX = _load("read_outbox")
ACK_OUTBOX = _load("ack_outbox")
LOAD_JOURNAL = _load("load_journal")
APPEND_JOURNAL = _load("append_journal")
CLEAR_JOURNAL = _load("clear_journal")
ALLOCATE_VERSION = _load("allocate_version")
RECORD_VERSION = _load("record_version")
OPEN_SESSION = _load("open_session")
READ_SESSION = _load("read_session")
APPEND_SESSION = _load("append_session")
CLAIM_SESSION = _load("claim_session")
UNCLAIM_SESSION = _load("unclaim_session")
FINISH_SESSION = _load("finish_session")
DELETE_SESSION = _load("delete_session")
OUTSIDE_EPISODE = _load("outside_episode")

ALL = tuple(value for value in list(globals().values()) if isinstance(value, Script))
