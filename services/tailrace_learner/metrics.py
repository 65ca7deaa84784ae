"""Prometheus metrics of the learner; `StepFinished` carries the metrics of the run."""

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)

STEP = Gauge("tailrace_learner_step", "Optimizer steps done.")
BUSY_SECONDS = Histogram(
    "tailrace_learner_busy_seconds", "Seconds of computation per step.", buckets=_SECONDS
)
WAIT_SECONDS = Histogram(
    "tailrace_learner_wait_seconds", "Seconds of waiting for groups per step.", buckets=_SECONDS
)
PUBLISH_SECONDS = Histogram(
    "tailrace_learner_publish_seconds", "Seconds to publish a version.", buckets=_SECONDS
)
CHECKPOINT_SECONDS = Histogram(
    "tailrace_learner_checkpoint_seconds", "Seconds to save a checkpoint.", buckets=_SECONDS
)
TRAINED_TOKENS = Counter("tailrace_learner_trained_tokens", "Tokens that carried a loss.")
GROUPS = Counter("tailrace_learner_groups", "Groups taken, by outcome.", ["outcome"])
MASKED_TOKENS = Counter(
    "tailrace_learner_masked_tokens", "Sampled tokens not trained, by reason.", ["reason"]
)
DRIFT = Gauge(
    "tailrace_learner_drift",
    "Mean absolute difference of learner and server log-probabilities, by the weights of the tokens.",
    ["server_id"],
)
QUARANTINES = Counter("tailrace_learner_quarantines", "Servers quarantined beyond `max_mismatch`.")
RETAINED_BYTES = Gauge(
    "tailrace_learner_retained_bytes", "Trained groups that no checkpoint holds yet."
)
FAILED_CHECKPOINTS = Counter(
    "tailrace_learner_failed_checkpoints", "Checkpoints that the disk refused."
)
FAILED_TRAJECTORY_FILES = Counter(
    "tailrace_learner_failed_trajectory_files", "Trajectory files that the disk refused."
)
FAILED_TRACKERS = Counter("tailrace_learner_failed_trackers", "Failures of a tracker.", ["tracker"])
SKIPPED_UPDATES = Counter(
    "tailrace_learner_skipped_updates", "Updates without a finite loss or gradient."
)
DEVICE_WAIT_SECONDS = Histogram(
    "tailrace_learner_device_wait_seconds",
    "Time until all inference servers sleep (`colocated: true`).",
    buckets=(0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 20.0, 60.0),
)
