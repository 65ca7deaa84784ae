"""Weights as bytes, from the learner to the inference servers. Only broadcasts need torch.

| module | contains |
|---|---|
| `tensors` | `TensorBytes`, layout of the flat buffer, checksums |
| `target_types` | versions in the types that servers declare |
| `buffers` | host memory of versions that arrive over the network |
| `segment` | named shared memory; the manifest of a sealed segment is behind its bytes |
| `mappings` | segments of another process, mapped once |
| `chunks` | ranges of a buffer over ZMQ, pulled by credit |
| `deltas` | differences between two versions, and the version from them |
| `copying` | copy of a buffer from shared memory of the same host, else over ZMQ |
| `publisher` | the learner's side: `WeightPublisher` |
| `files` | versions as safetensors files on a volume |
| `relay` | fetches from other servers, and passes on to them while bytes arrive |
| `broadcast`, `process_group` | places in broadcasts; their groups of torch.distributed |
| `receiver` | the inference server's side: `WeightReceiver` |
| `background` | thread that checks and stages, behind those that generate |
| `staged` | fetched versions: `StagedWeights` |
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
from tailrace.weights.receiver import WeightReceiver
from tailrace.weights.staged import StagedWeights
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
