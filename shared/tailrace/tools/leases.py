"""Who is still wanted: calls and sessions whose callers promised to be heard of (pure, given a clock).

Invariant: nothing expires while this process itself was cut off from its callers; `renew_all` says so.
"""

from __future__ import annotations

from collections.abc import Iterable


class Leases:
    """What ends when its caller falls silent, by key."""

    def __init__(self) -> None:
        self._lease_s: dict[str, float] = {}
        self._heard_s: dict[str, float] = {}

    def begin(self, key: str, lease_s: float, now_s: float) -> None:
        """A caller promises to be heard of at least every `lease_s`; 0 promises nothing."""
        if lease_s > 0:
            self._lease_s[key] = lease_s
            self._heard_s[key] = now_s

    def renew(self, keys: Iterable[str], now_s: float) -> None:
        """The caller of these was heard of."""
        for key in keys:
            if key in self._heard_s:
                self._heard_s[key] = now_s

    def renew_all(self, now_s: float) -> None:
        """We could not have heard anybody."""
        self.renew(list(self._heard_s), now_s)

    def end(self, key: str) -> None:
        """No longer of interest."""
        self._lease_s.pop(key, None)
        self._heard_s.pop(key, None)

    def expired(self, now_s: float) -> list[str]:
        """Whose callers have been silent for too long."""
        return [key for key, heard_s in self._heard_s.items() if now_s - heard_s > self._lease_s[key]]
