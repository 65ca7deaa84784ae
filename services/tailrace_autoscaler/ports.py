"""Interfaces that the autoscaler needs."""

from typing import Protocol


class WorkloadsUnavailableError(RuntimeError):
    """The Kubernetes API does not answer, or refuses; the message has its reason."""


class MissingWorkloadError(WorkloadsUnavailableError):
    """The workload is not there."""


class Workloads(Protocol):
    """Replicas of workloads in the release's namespace; errors are `WorkloadsUnavailableError`."""

    async def replicas(self, kind: str, name: str) -> int:
        """Replicas that are set."""
        ...

    async def set_replicas(self, kind: str, name: str, replicas: int) -> None:
        """Set replicas."""
        ...
