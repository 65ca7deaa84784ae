"""Errors of weight transfers. After each of them the active version is unchanged."""


class WeightsError(Exception):
    """Base of the errors of this package."""


class ManifestError(WeightsError, ValueError):
    """A manifest, or the tensors for one, contradicts itself.

    Attributes: `tensor` (empty for the whole manifest), `reason`.
    """

    def __init__(self, tensor: str, reason: str) -> None:
        super().__init__(f"tensor {tensor!r}: {reason}" if tensor else reason)
        self.tensor = tensor
        self.reason = reason


class ChecksumError(WeightsError):
    """The bytes of a tensor do not match its manifest.

    Attributes: `tensor`, `policy_version` (-1: not assigned yet).
    """

    def __init__(self, tensor: str, policy_version: int) -> None:
        super().__init__(f"checksum of tensor {tensor!r} of policy version {policy_version} is wrong")
        self.tensor = tensor
        self.policy_version = policy_version


class WeightsGoneError(WeightsError):
    """The source no longer holds this version, since a newer one is published.

    Attributes: `policy_version`, `reason`.
    """

    def __init__(self, policy_version: int, reason: str) -> None:
        super().__init__(f"policy version {policy_version} cannot be fetched: {reason}")
        self.policy_version = policy_version
        self.reason = reason


class TargetTypeError(WeightsError):
    """weight_sync has not got the weights in the type that this server declares.

    Attributes: `target`, `reason`.
    """

    def __init__(self, target: str, reason: str) -> None:
        super().__init__(f"no weights as {target} (inference.weights_dtype): {reason}")
        self.target = target
        self.reason = reason


class WeightsUnreachableError(WeightsError):
    """The source does not answer over ZMQ.

    Attributes: `endpoint`, `silent_s`.
    """

    def __init__(self, endpoint: str, silent_s: float) -> None:
        super().__init__(
            f"no weights from {endpoint or 'a source without ZMQ'} for {silent_s:.1f} s. Remedy: on "
            "several hosts, bind the sender to an address that others reach (`weight_sync.bind_host`)"
        )
        self.endpoint = endpoint
        self.silent_s = silent_s


class WeightsNotTakenError(WeightsError):
    """weight_sync did not accept the learner's weights.

    Attributes: `lineage`, `optimizer_step`, `reason`.
    """

    def __init__(self, lineage: str, optimizer_step: int, reason: str) -> None:
        super().__init__(f"weight_sync did not accept step {optimizer_step} of {lineage!r}: {reason}")
        self.lineage = lineage
        self.optimizer_step = optimizer_step
        self.reason = reason


class SegmentSpaceError(WeightsError):
    """Shared memory has no room for the weights.

    Attributes: `folder`, `num_bytes`.
    """

    def __init__(self, folder: str, num_bytes: int) -> None:
        super().__init__(
            f"no room for {num_bytes} bytes of weights in {folder}. Remedy: enlarge it (docker: "
            "--shm-size, Kubernetes: an emptyDir of medium Memory), or lower weight_sync.keep_versions"
        )
        self.folder = folder
        self.num_bytes = num_bytes
