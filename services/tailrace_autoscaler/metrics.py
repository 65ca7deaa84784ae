"""Prometheus metrics of the autoscaler."""

from prometheus_client import Counter, Gauge

DESIRED = Gauge(
    "tailrace_autoscaler_desired_replicas", "Replicas that the run can use now.", ["target"]
)
OBSERVED = Gauge("tailrace_autoscaler_observed_replicas", "Replicas set on Kubernetes.", ["target"])
HELD = Counter("tailrace_autoscaler_held", "Looks that changed nothing, by reason.", ["reason"])
CHANGES = Counter(
    "tailrace_autoscaler_changes", "Replica counts set, or with dry_run meant.", ["target", "direction"]
)
