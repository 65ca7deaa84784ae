"""Find the checkpoints of a run directory."""

from pathlib import Path

from tailrace.config import ConfigError


def newest_checkpoint(run_dir: Path) -> Path:
    """The checkpoint of a run with the highest step; `ConfigError` when there is none."""
    found = [path for path in (run_dir / "checkpoints").glob("step_*") if path.name[5:].isdigit()]
    if not found:
        raise ConfigError(f"no checkpoint in {run_dir}/checkpoints: train first, or name --checkpoint")
    return max(found, key=lambda path: int(path.name[5:]))
