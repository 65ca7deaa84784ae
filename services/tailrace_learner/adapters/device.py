"""The learner's turns on a device that inference servers use too (`colocated: true`)."""

from tailrace.device_turn import DeviceTurn
from tailrace_learner import metrics
from tailrace_learner.adapters.worker import Worker
from tailrace_learner.ports import Computer


class LearnerDevice:
    """See `Device`. The learner has the device when this is made."""

    is_shared = True

    def __init__(self, turn: DeviceTurn, compute: Computer, worker: Worker) -> None:
        self._turn = turn
        self._compute = compute
        self._worker = worker

    async def take(self) -> None:
        """Waits until all servers sleep; does nothing during the learner's turn."""
        if not self._turn.is_held:
            with metrics.DEVICE_WAIT_SECONDS.time():
                await self._turn.take()
            await self._compute(self._worker.wake)

    async def give(self) -> None:
        """Moves all tensors to the host, and lets the servers compute."""
        if self._turn.is_held:
            await self._compute(self._worker.sleep)
            self._turn.give()
