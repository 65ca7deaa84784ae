"""Weights from the learner to the engines: manifests, sources, chunks, reports."""

from typing import Any

import msgspec

from tailrace_protos.base import Count, Finite, Message, PolicyVersion


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor in the flat buffer of a version."""

    name: str  # Hugging Face parameter name
    dtype: str  # torch name: float32, bfloat16, ...
    shape: tuple[Count, ...]
    offset: Count  # bytes from the start of the buffer, 64-byte aligned
    num_bytes: Count
    checksum: int  # xxh3_64 of the tensor's bytes


class WeightManifest(Message, frozen=True, tag="weight_manifest"):
    """Description of one policy version, without its bytes."""

    policy_version: PolicyVersion  # never reused
    lineage: str  # changes when a learner resumes from a checkpoint
    optimizer_step: int
    base_version: int | None  # None: full weights; else adapters that add to this version
    tensors: tuple[TensorEntry, ...]
    num_bytes: Count
    target: str = ""  # type that servers declared (`inference.weights_dtype`); empty: as published


class DeltaEntry(msgspec.Struct, frozen=True, array_like=True):
    """Change of one tensor; those that are not listed are equal."""

    tensor: Count  # index in `WeightManifest.tensors`
    num_changed: int  # elements that differ; -1: the payload holds all of them
    num_bytes: Count  # compressed, behind the payload of the entry before


class WeightDelta(msgspec.Struct, frozen=True):
    """Change that turns the bytes of version `from_version` into those of `policy_version`."""

    from_version: PolicyVersion
    policy_version: PolicyVersion
    entries: tuple[DeltaEntry, ...]
    num_bytes: Count


class WeightSource(msgspec.Struct, frozen=True):
    """Addresses of a buffer: a file on a volume, shared memory on the same host, ZMQ from others."""

    host_id: str
    shm_name: str
    zmq_endpoint: str
    zmq_public_key: str = ""
    file: str = ""  # safetensors, on a volume that all hosts mount at the same path


class OfferWeights(Message, frozen=True, tag="offer_weights"):
    """The learner offers weights; `manifest.policy_version` is -1 until weight_sync assigns it."""

    manifest: WeightManifest
    source: WeightSource


class WeightsTaken(Message, frozen=True, tag="weights_taken"):
    """Answer to `OfferWeights`: weight_sync holds a verified copy, the learner may reuse its buffer."""

    policy_version: PolicyVersion


class BaseWeights(msgspec.Struct, frozen=True):
    """Base version of adapters, with its source."""

    manifest: WeightManifest
    source: WeightSource


class WeightsAvailable(Message, frozen=True, tag="weights_available"):
    """New weights for all inference servers, with their source."""

    manifest: WeightManifest
    source: WeightSource
    base: BaseWeights | None = None  # for servers without `manifest.base_version`
    deltas: tuple[WeightDelta, ...] = ()  # each continues the one before; the last gives `manifest`
    keep_baseline: bool = False  # deltas to this version may follow
    relays: bool = False  # servers fetch from each other; `RouteRequest` names from which
    broadcasts: bool = False  # servers that ask by `BroadcastRequest` get it together


class CurrentWeightsRequest(Message, frozen=True, tag="current_weights_request"):
    """Request of a server for the newest version, in the type that it declares."""

    server_id: str
    target: str = ""  # empty: as the learner publishes it


class CurrentWeightsReply(Message, frozen=True, tag="current_weights_reply"):
    """The newest version, None before the first."""

    available: WeightsAvailable | None


class WeightsApplied(Message, frozen=True, tag="weights_applied"):
    """Report of a server: it serves `policy_version` now, or failed with `error`."""

    server_id: str
    policy_version: PolicyVersion
    fetch_s: Finite
    stage_s: Finite
    swap_s: Finite
    error: str = ""
    relay: WeightSource | None = None  # address at which the server passes the version on
    target: str = ""  # as in the manifest of the version
    damaged: bool = False  # the error: the bytes that came from weight_sync have wrong checksums


class RouteRequest(Message, frozen=True, tag="route_request"):
    """Request of a server for a holder from which it fetches its part of a version, or of a delta.

    A buffer travels in `num_stripes` parts (chunk `i` belongs to part `i % num_stripes`), each along a
    tree of its own.
    """

    server_id: str
    policy_version: PolicyVersion
    is_delta: bool
    stripe: Count
    relay: WeightSource  # address at which this server passes on the chunks that it has
    failed: str = ""  # server id of a holder that sends nothing
    target: str = ""  # as in the manifest of the version


class RouteReply(Message, frozen=True, tag="route_reply"):
    """Answer to `RouteRequest`: the holder, empty `server_id` for weight_sync itself."""

    server_id: str
    source: WeightSource


class BroadcastRequest(Message, frozen=True, tag="broadcast_request"):
    """Request of a server, ready to receive, to be part of a broadcast of a version."""

    server_id: str
    policy_version: PolicyVersion
    group_id: str = ""  # process group that the server holds from a broadcast before
    gpu: str = ""  # id of its GPU; empty: it receives in host memory


class BroadcastReply(Message, frozen=True, tag="broadcast_reply"):
    """Answer to `BroadcastRequest`: a place in a process group of torch.distributed.

    weight_sync has rank 0. Without `group_id` there is none: the server fetches the version otherwise.
    """

    group_id: str = ""  # equal to that of the request: the server keeps its group and its rank
    rank: Count = 0
    size: Count = 0
    backend: str = ""  # gloo, nccl
    store_host: str = ""  # TCPStore through which the members of a new group meet
    store_port: Count = 0
    timeout_s: Finite = 0.0  # of each operation; after one that fails, the group is gone


class ReportKept(Message, frozen=True, tag="report_kept"):
    """Answer to `WeightsApplied`: weight_sync has recorded it."""

    policy_version: PolicyVersion


class ChunkRequest(Message, frozen=True, tag="chunk_request"):
    """Request for one range of a version's buffer over ZMQ, or of the delta to it."""

    policy_version: PolicyVersion
    offset: Count
    num_bytes: Count
    is_delta: bool = False


class ChunkReply(Message, frozen=True, tag="chunk_reply"):
    """First frame of an answer; the bytes of the requested range are the second one.

    With `waiting` the holder has not got the range itself yet, and answers again. With `error` (version
    no longer held, wrong range) there are no bytes either.
    """

    policy_version: PolicyVersion
    offset: Count
    waiting: bool = False
    error: str = ""


CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "context_length",
)
"""Names of the tokens that a model reads at most, in configurations of Hugging Face."""


class ModelCard(Message, frozen=True, tag="model_card"):
    """Description of the model for other services; the learner writes it once to Redis."""

    config_json: bytes  # Hugging Face config.json
    tokenizer_files: dict[str, bytes]  # tokenizer.json, tokenizer_config.json, chat_template.jinja
    trains_adapters: bool = False  # later versions hold adapters alone; engines keep their base

    @property
    def context_tokens(self) -> int:
        """Tokens that the model reads at most; 0 if its configuration does not say."""
        return self._first(CONTEXT_KEYS)

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model knows; 0 if its configuration does not say."""
        return self._first(("vocab_size",))

    def _first(self, keys: tuple[str, ...]) -> int:
        config = msgspec.json.decode(self.config_json, type=dict[str, Any])
        config |= config.get("text_config") or {}
        found = (config.get(key) for key in keys)
        return next((value for value in found if isinstance(value, int) and value > 0), 0)
