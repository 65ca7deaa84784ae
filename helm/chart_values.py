"""Types of the chart's values, as `values.yaml` describes them; the schema comes from here."""

from typing import Annotated, Any, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
NUMBER = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)"
Size = Annotated[str, msgspec.Meta(pattern=rf"^{NUMBER}([eE][0-9]+|[KMGTPE]i|[kMGTPE])?$")]
Quantity = (
    Annotated[str, msgspec.Meta(pattern=rf"^\+?{NUMBER}([eE][-+]?[0-9]+|[KMGTPE]i|[numkMGTPE])?$")]
    | Count
)
Url = Annotated[str, msgspec.Meta(pattern=r"^$|^(nats|tls|redis|rediss|http|https)://")]
ResourceName = Annotated[
    str,
    msgspec.Meta(pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$"),
]
Release = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9-]*$")]
Grace = Annotated[int, msgspec.Meta(ge=1)]
Objects = list[dict[str, Any]]
Engine = Literal["inference-torch", "inference-vllm", "inference-sglang"]
ServiceName = Annotated[
    str,
    msgspec.Meta(
        pattern="^(scheduler|agents|gateway|inference|reward|sandbox|learner|weight_sync|autoscaler|run)$"
    ),
]
ImageName = Annotated[
    str,
    msgspec.Meta(
        pattern="^(scheduler|agents|gateway|reward|sandbox|learner|weight[_-]sync|autoscaler|run"
        "|inference-(torch|vllm|sglang))$"
    ),
]


class Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base: unknown keys are refused by name."""


class Resources(Strict):
    """CPU and memory."""

    requests: dict[str, Quantity] = {}
    limits: dict[str, Quantity] = {}


class Budget(Strict):
    """A PodDisruptionBudget."""

    maxUnavailable: int | str | None = None
    minAvailable: int | str | None = None


class Placement(Strict):
    """Where pods may run, and what they are marked with."""

    podLabels: dict[str, str] = {}
    podAnnotations: dict[str, str] = {}
    nodeSelector: dict[str, str] = {}
    tolerations: Objects = []
    affinity: dict[str, Any] = {}
    priorityClassName: str = ""
    schedulerName: str = ""
    runtimeClassName: str = ""


class Service(Placement):
    """A pod with a program of ours."""

    env: Objects = []
    numThreads: Annotated[int, msgspec.Meta(ge=1)] | None = None


class Defaults(Service, kw_only=True):
    """What every pod gets."""

    runAsUser: Annotated[int, msgspec.Meta(ge=1)] | None = None
    gpuResource: ResourceName
    labels: dict[str, str] = {}
    writableRoot: bool = False


class Workload(Service):
    """A service."""

    replicas: Count = 1
    resources: Resources | None = None
    terminationGracePeriodSeconds: Grace | None = None
    pdb: Budget | None = None


class GatewayService(Strict):
    """Its Service."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    annotations: dict[str, str] = {}


class Ingress(Strict):
    """The gateway from outside."""

    enabled: bool = False
    className: str = ""
    host: str = ""
    annotations: dict[str, str] = {}
    tlsSecret: str = ""


class Gateway(Workload, kw_only=True):
    """The gateway."""

    enabled: bool = False
    service: GatewayService
    ingress: Ingress


class WeightSync(Service):
    """weight_sync, which has one replica."""

    shm: Size = ""
    resources: Resources | None = None
    terminationGracePeriodSeconds: Grace | None = None
    storage: Size | Literal[""] = ""
    storageClass: str = ""
    pdb: Budget | None = None


class Pool(Workload):
    """Inference servers of one engine."""

    image: Engine = "inference-torch"
    nodes: Annotated[int, msgspec.Meta(ge=1)] = 1
    gpus: Count = 0
    gpuResource: ResourceName | None = None
    shm: Size = ""
    overrides: dict[str, Any] = {}


class Inference(Strict):
    """All pools."""

    pools: dict[Annotated[str, msgspec.Meta(pattern="^[a-z0-9]+(-[a-z0-9]+)*$")], Pool | None]


class Learner(Service, kw_only=True):
    """The learner's nodes."""

    nodes: Annotated[int, msgspec.Meta(ge=1)]
    gpus: Count = 0
    gpuResource: ResourceName | None = None
    shm: Size = ""
    resources: Resources | None = None
    terminationGracePeriodSeconds: Grace | None = None
    pdb: Budget | None = None


class Autoscaling(Service):
    """The autoscaler."""

    enabled: bool = False
    mode: Literal["metric", "keda", "hpa", "builtin"] = "metric"
    prometheusUrl: Url = ""
    resources: Resources | None = None


class Run(Service):
    """The Job that follows the run."""

    resources: Resources | None = None
    ttlSecondsAfterFinished: Count | None = None


class External(Strict):
    """A server that is brought."""

    url: Url = ""


class Nats(Placement, kw_only=True):
    """nats-server."""

    external: External
    image: str = ""
    storage: Size = ""
    storageClass: str = ""
    resources: Resources | None = None


class Redis(Nats, kw_only=True):
    """Valkey."""

    fsync: Literal["everysec", "always"] = "everysec"


class Credentials(Strict):
    """Passwords."""

    existingSecrets: bool = False
    seed: str = ""


class Tls(Strict):
    """Certificates of NATS and Redis."""

    enabled: bool
    plainNodes: bool = False
    existingSecret: str = ""


class Runs(Strict, kw_only=True):
    """Volume of the run directories."""

    size: Size = ""
    accessModes: Annotated[list[Literal["ReadWriteOnce", "ReadWriteMany"]], msgspec.Meta(min_length=1)]
    storageClass: str = ""
    existingClaim: str = ""
    keep: bool = False


class Models(Strict):
    """Volume of models."""

    existingClaim: str = ""


class Hub(Strict, kw_only=True):
    """Hugging Face."""

    tokenSecret: str = ""
    offline: bool


class ObjectStore(Strict):
    """An object store that speaks S3."""

    credentialsSecret: str = ""
    endpoint: Url = ""
    region: str = ""


class Storage(Strict, kw_only=True):
    """Volumes, and stores outside of the cluster."""

    runs: Runs
    models: Models
    hub: Hub
    state: Size = ""
    objectStore: ObjectStore


class CodeImage(Strict):
    """An image with the user's modules."""

    name: str = ""
    path: str = ""


class Git(Strict):
    """A repository with the user's modules."""

    url: str = ""
    ref: str = ""
    image: str = ""


class UserCode(Strict, kw_only=True):
    """The user's modules."""

    files: dict[Annotated[str, msgspec.Meta(pattern=r"^[-._a-zA-Z0-9]+$")], str] = {}
    image: CodeImage
    git: Git
    resources: Resources | None = None


class NetworkPolicy(Strict):
    """Who may reach whom."""

    enabled: bool = True
    metricsFrom: Objects = []
    gatewayFrom: Objects = []
    kedaFrom: Objects = []
    extraEgress: dict[ServiceName, Objects] = {}
    apiServer: Objects = []
    dnsTo: Objects = []


class Monitoring(Strict):
    """Prometheus and Grafana."""

    podMonitor: bool = False
    labels: dict[str, str] = {}
    interval: Annotated[str, msgspec.Meta(pattern="^[0-9]+(ms|s|m)$")] = "15s"
    dashboards: bool = False
    rules: bool = False


class Telemetry(Strict):
    """Traces and logs."""

    otlpEndpoint: Url = ""
    otlpHeadersSecret: str = ""
    logLevel: Literal["", "debug", "info", "warning", "error"] = ""


class Image(Strict):
    """The services' images."""

    registry: str = ""
    repository: str = ""
    tag: str = ""
    digests: dict[ImageName, Annotated[str, msgspec.Meta(pattern="^sha256:[0-9a-f]{64}$")]] = {}
    pullPolicy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    pullSecrets: Objects = []


class Standing(Strict):
    """Mode standing."""

    runs: list[Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]] = []


class Servers(Strict):
    """Servers of a standing release."""

    release: Release = ""


class ChartValues(Strict):
    """All values."""

    mode: Literal["job", "standing"]
    experiment: dict[str, Any]
    standing: Standing
    servers: Servers
    image: Image
    defaults: Defaults
    scheduler: Workload
    agents: Workload
    gateway: Gateway
    reward: Workload
    sandbox: Workload
    weight_sync: WeightSync
    inference: Inference
    learner: Learner
    autoscaling: Autoscaling
    run: Run
    nats: Nats
    redis: Redis
    credentials: Credentials
    tls: Tls
    storage: Storage
    userCode: UserCode
    networkPolicy: NetworkPolicy
    monitoring: Monitoring
    telemetry: Telemetry
