"""The error for a file of a run that holds something else than a run wrote there."""

from pathlib import Path

from tailrace.config import ConfigError


class DamagedRunError(ConfigError):
    """A file of a run holds something else than a run wrote there: `path`, `reason`."""

    def __init__(self, path: Path, reason: object) -> None:
        super().__init__(
            f"{path} is damaged, or of another version of Tailrace ({' '.join(str(reason).split())}): "
            "restore it, or move the run's folder away"
        )
        self.path = path
        self.reason = str(reason)
