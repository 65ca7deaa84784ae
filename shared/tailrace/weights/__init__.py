"""Weights as bytes on their way from the learner to the inference servers; torch is not needed here.

| module | holds |
|---|---|
| `tensors` | `TensorBytes`, the flat buffer's layout, checksums |
| `segment` | named shared memory, with its manifest behind the bytes once it is final |
| `chunks` | ranges of a buffer over ZMQ, pulled by credit |
| `copying` | one buffer from its source: shared memory on the same host, ZMQ otherwise |
| `publisher` | the learner's side: `WeightPublisher` |
| `receiver` | the inference server's side: `WeightReceiver`, `StagedWeights` |
"""

from tailrace.weights.errors import (
    ChecksumError,
    ManifestError,
    SegmentSpaceError,
    WeightsError,
    WeightsGoneError,
    WeightsNotTakenError,
    WeightsUnreachableError,
)
from tailrace.weights.publisher import WeightPublisher
from tailrace.weights.receiver import StagedWeights, WeightReceiver
from tailrace.weights.tensors import TensorBytes

__all__ = [
    "ChecksumError",
    "ManifestError",
    "SegmentSpaceError",
    "StagedWeights",
    "TensorBytes",
    "WeightPublisher",
    "WeightReceiver",
    "WeightsError",
    "WeightsGoneError",
    "WeightsNotTakenError",
    "WeightsUnreachableError",
]
