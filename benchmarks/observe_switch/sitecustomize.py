"""Lets every process of a run sample episodes in some blocks of time only.

Python imports it at the start of each process, as its folder is in `PYTHONPATH`.
"""

import time

from benchmarks.observe_switch import is_on
from tailrace import tracing

_sampled = tracing.episode


def _episode(episode_id: str) -> str:
    return _sampled(episode_id) if is_on(time.time()) else ""


tracing.episode = _episode
