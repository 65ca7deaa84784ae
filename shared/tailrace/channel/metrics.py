"""Prometheus metrics of the generation channel, updated per frame instead of per token.

`side` is `client` or `server`. Labels are resolved once; the hot path only adds.
"""

from prometheus_client import Counter, Gauge

_CALLS = Counter("tailrace_channel_calls", "Calls begun.", ["side"])
_ENDED = Counter(
    "tailrace_channel_ended_calls",
    "Calls ended, by outcome (finished, failed, lost).",
    ["side", "outcome"],
)
_IN_FLIGHT = Gauge("tailrace_channel_in_flight_calls", "Calls sent and not ended.", ["side"])
_WAITING = Gauge("tailrace_channel_waiting_calls", "Calls waiting for a place at a server.")
_REFUSED = Counter(
    "tailrace_channel_refused_calls", "Calls refused before they began, by reason.", ["side", "reason"]
)
_CHUNKS = Counter("tailrace_channel_chunks", "Token chunks on the wire.", ["side"])
_FRAMES = Counter("tailrace_channel_frames", "Frames on the wire.", ["side", "direction"])
_BYTES = Counter("tailrace_channel_frame_bytes", "Bytes of frames on the wire.", ["side", "direction"])
_MALFORMED = Counter(
    "tailrace_channel_malformed", "Frames or messages that could not be read.", ["side"]
)
_STRAY = Counter("tailrace_channel_stray_chunks", "Chunks of unknown or ended calls.", ["side"])
_LINKS_LOST = Counter(
    "tailrace_channel_lost_links", "Links ended early, by cause (see `LinkLoss`).", ["side", "cause"]
)
_CONGESTED = Counter("tailrace_channel_congestions", "Times a link's peer was too slow.", ["side"])


class ChannelMetrics:
    """Metrics of one side."""

    def __init__(self, side: str) -> None:
        self._side = side
        self.calls = _CALLS.labels(side)
        self.finished = _ENDED.labels(side, "finished")
        self.failed = _ENDED.labels(side, "failed")
        self.lost = _ENDED.labels(side, "lost")
        self.in_flight = _IN_FLIGHT.labels(side)
        self.waiting = _WAITING
        self.chunks = _CHUNKS.labels(side)
        self.frames_in = _FRAMES.labels(side, "in")
        self.frames_out = _FRAMES.labels(side, "out")
        self.bytes_in = _BYTES.labels(side, "in")
        self.bytes_out = _BYTES.labels(side, "out")
        self.malformed = _MALFORMED.labels(side)
        self.stray = _STRAY.labels(side)
        self.congestions = _CONGESTED.labels(side)

    def refused(self, reason: str) -> None:
        """Counts a refused call."""
        _REFUSED.labels(self._side, reason).inc()

    def link_lost(self, cause: str) -> None:
        """Counts a lost link."""
        _LINKS_LOST.labels(self._side, cause).inc()
