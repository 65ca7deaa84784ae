"""Estimate of host memory: weights that services hold in `/dev/shm` and beside it (pure).

A file in `/dev/shm` is memory of its host, and counts towards the limit of its container.
"""

from typing import NamedTuple

from tailrace_cli.experiment import Experiment
from tailrace_cli.loading.facts import ModelFacts
from tailrace_cli.loading.needs import dtype_bytes, engine_element, trained_parameters

NUM_STAGED = 2  # files of a server that stages versions: the one that arrives, and the one before
STAGED_ENGINES = ("vllm", "sglang")
_MASTER_BYTES = 4  # of a master weight, float32


class HostNeeds(NamedTuple):
    """Bytes on one host."""

    shared: int = 0  # files in /dev/shm
    private: int = 0

    @property
    def total(self) -> int:
        """Bytes of the host's memory."""
        return self.shared + self.private


def version_bytes(experiment: Experiment, model: ModelFacts) -> int:
    """Bytes of one published version."""
    return dtype_bytes(experiment.learner.model_args.dtype) * model.num_parameters


def learner_host(experiment: Experiment, model: ModelFacts) -> HostNeeds:
    """Memory of all ranks: the offered version, that of `fsdp2` beside it, and old master weights."""
    learner = experiment.learner
    copies = 1 + (learner.strategy_args.resolved_name == "fsdp2")  # all ranks write into one
    num_old = min(learner.mismatch_versions, experiment.run.max_staleness)
    old = num_old * _MASTER_BYTES * trained_parameters(experiment, model)
    return HostNeeds(copies * version_bytes(experiment, model), old)


def weight_sync_host(experiment: Experiment, model: ModelFacts) -> HostNeeds:
    """Memory of weight_sync: the kept versions and one that arrives; with adapters, their base."""
    copies = 1 if experiment.learner.lora else experiment.weight_sync.keep_versions + 1
    return HostNeeds(copies * version_bytes(experiment, model))


def server_host(
    experiment: Experiment, model: ModelFacts, *, is_on_gpu: bool, is_remote: bool = False
) -> HostNeeds:
    """Memory of one inference server while a version arrives.

    vLLM and SGLang read versions from files, which are written from a copy in the type of the engine.
    `is_remote`: on another host than weight_sync it receives the version first, and keeps the one
    before for differences between them.
    """
    received = 2 * version_bytes(experiment, model) if is_remote else 0
    if experiment.inference.engine not in STAGED_ENGINES:
        return HostNeeds(0, received)
    staged = engine_element(experiment, is_on_gpu=is_on_gpu) * model.num_parameters
    return HostNeeds(NUM_STAGED * staged, staged + received)
