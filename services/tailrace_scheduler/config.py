"""Configuration of the scheduler: the `scheduler` section of an experiment file."""

from tailrace.config import MAX_EVAL_EPISODES, Config, RunConfig


class SchedulerConfig(Config, frozen=True, kw_only=True):
    """Tasks to play, their groups, the bounds of a run, and the silence after which a peer is gone."""

    tags: tuple[str, ...]
    """Tasks to train on: names in `agents.custom_envs` or `agents.datasets`."""

    num_groups_partition: tuple[int, ...] = ()
    """Groups of each tag in every cycle of the data order, in the order of `tags`; empty: one each."""

    eval_tags: tuple[str, ...] = ()
    """Tasks to evaluate on, in turn; empty: those of `tags`. Name environments whose `env_config` plays
    held-out tasks, and data sets of held-out rows."""

    eval_num_groups_partition: tuple[int, ...] = ()
    """Tasks of each evaluation tag in every cycle of the evaluation set, in the order of `eval_tags`;
    empty: one each."""

    eval_groups: int = 128
    """Tasks of the evaluation set. Their seeds are 0 to `eval_groups` - 1 for every `seed`, so that
    curves of different runs can be compared."""

    eval_group_size: int = 1
    """Episodes of every evaluation task."""

    eval_greedy: bool = False
    """Play every evaluation task once more at temperature 0. Its results are `eval/greedy/...` in
    `metrics.jsonl`. A policy may succeed greedily long before it does when sampled, so that a rising
    sampled curve alone can mean less noise and nothing learnt."""

    eval_interim_groups: int = 0
    """Tasks, from the start of the set, of evaluations between the first and the last one; 0: all."""

    pin_evaluations: bool | None = None
    """true: training stops at the step of an evaluation until that evaluation has its result, so that
    all its episodes are played by the weights of that step. false: training goes on meanwhile, and
    later tokens of a longer evaluation come from newer weights. null: true with named `evaluations`."""

    group_timeout_s: float = 600.0
    """Seconds until a group closes with the members that have settled, from the moment when its last
    episode got a server. With `agents.workflow.mode: outside`: seconds after its last episode was
    leased for the first time."""

    ask_after_s: float = 5.0
    """Seconds between two turns of an episode (a tool call, a step of an environment) after which the
    second one asks for its server. Shorter ones stay without asking. An asking turn stays, moves to
    another server, or waits until one has room, at most until the episode's deadline."""

    min_valid: int = 0
    """Members with a valid outcome that a group needs to be trained on; 0: two if members are
    compared with each other (`group_size` above 1), else one."""

    max_waste: float = 0.05
    """With `stale_groups: auto`: share of the sampled tokens that groups may throw away by closing
    early."""

    max_buffered_groups: int = 0
    """Groups that may run or wait for the learner; admission stops at this bound. 0: no bound besides
    `max_buffered_bytes` and the run's `max_staleness`. A group that waits for a server costs no message
    and less than 1 KB an episode."""

    max_buffered_bytes: int = 1 << 30
    """Bytes of trajectories that may wait for the learner, with those expected of running groups.
    Admission stops at this bound, unless the learner could then never get the groups of one step."""

    max_attempts: int = 3
    """Times that an episode is published if the work queue loses it or dead-letters it; then it settles
    as `infra_failure`."""

    lease_ttl_s: float = 15.0
    """Seconds of silence after which an agents worker counts as gone and its leases expire."""

    server_timeout_s: float = 5.0
    """Seconds without a heartbeat after which an inference server gets no more episodes."""

    max_version_spread: int = 0
    """Policy versions that an inference server may lie behind the newest one that another server has
    applied. A server further behind finishes its episodes and gets no new ones until it has caught up;
    the others go on. 0: the run's `max_staleness`, at least 1."""

    reconcile_interval_s: float = 5.0
    """Seconds between two comparisons of unsettled episodes with the work queue; an episode missing
    in two of them is published again."""

    max_failed_groups: int = 20
    """Groups in a row, of training and evaluation, that may end without a valid episode before the
    first step; then the run ends with exit code 1 and the commonest reason. 0: never."""

    failed_groups_window: int = 40
    """Training groups that are looked at after the first step: if more than 90% of the newest ones had
    nothing but infrastructure failures, for `failed_groups_grace_s`, the run ends. 0: never."""

    failed_groups_grace_s: float = 30.0
    """Seconds for which `failed_groups_window` must hold: a tool, judge or environment server may be
    away for that long."""

    max_untrained_steps: int = 50
    """Steps in a row, or as many groups given back, without a trained token (for example since all
    groups have equal rewards) or an applied update; then the run ends: as finished if nearly all of
    these groups succeed, else as failed. 0: never."""

    stall_timeout_s: float = 1200.0
    """Seconds, beyond `group_timeout_s`, without a valid episode, a step or an evaluation; then the run
    ends. A warm start does not count. 0: never."""

    def __post_init__(self) -> None:
        if not self.tags:
            raise ValueError("tags must name at least one of agents.custom_envs or agents.datasets")
        _check_shares("tags", self.tags, "num_groups_partition", self.num_groups_partition)
        eval_tags = self.eval_tags or self.tags
        _check_shares(
            "eval_tags", eval_tags, "eval_num_groups_partition", self.eval_num_groups_partition
        )
        self._check_counts()
        if not 0 <= self.max_waste <= 1:
            raise ValueError("max_waste must be a share, 0 to 1")
        for key in (
            "group_timeout_s",
            "ask_after_s",
            "lease_ttl_s",
            "server_timeout_s",
            "reconcile_interval_s",
        ):
            if not getattr(self, key) > 0:
                raise ValueError(f"{key} must be positive")

    def _check_counts(self) -> None:
        for key in ("eval_groups", "eval_group_size", "max_attempts"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1")
        if self.eval_groups * self.eval_episodes_per_task > MAX_EVAL_EPISODES:
            raise ValueError(
                f"eval_groups x eval_group_size must be at most {MAX_EVAL_EPISODES}: an evaluation "
                "plans its episodes at once"
            )
        for key in (
            "eval_interim_groups",
            "max_buffered_groups",
            "min_valid",
            "max_version_spread",
            *_LIMITS,
        ):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} must not be negative")

    def pins_evaluations(self, run: RunConfig) -> bool:
        """Tell whether weights stay as they are during an evaluation."""
        return bool(run.evaluations) if self.pin_evaluations is None else self.pin_evaluations

    def version_spread(self, run: RunConfig) -> int:
        """Versions that a server with new episodes may lie behind the newest one."""
        return self.max_version_spread or max(run.max_staleness, 1)

    @property
    def eval_episodes_per_task(self) -> int:
        """Episodes of an evaluation task, the greedy one included."""
        return self.eval_group_size + self.eval_greedy

    @property
    def interim_groups(self) -> int:
        """Tasks of an evaluation between the first and the last."""
        return self.eval_interim_groups or self.eval_groups

    def needed_valid(self, group_size: int) -> int:
        """Valid members that make a training group of `group_size` worth closing."""
        return self.min_valid or min(2, group_size)


_LIMITS = (
    "max_failed_groups",
    "failed_groups_window",
    "failed_groups_grace_s",
    "max_untrained_steps",
    "stall_timeout_s",
)


def _check_shares(tags_key: str, tags: tuple[str, ...], key: str, shares: tuple[int, ...]) -> None:
    if shares and len(shares) != len(tags):
        raise ValueError(f"{key} must have one number for each of {tags_key}")
    if any(share < 1 for share in shares):
        raise ValueError(f"{key} must hold positive numbers")


MIN_EPISODE_BYTES = 256
"""No settled episode is smaller than its own field names."""


class CapacityError(ValueError):
    """A bound under which the run could not make a single step.

    Attributes: `key` (where the bound is set), `value`, `needed` (the least that works).
    """

    def __init__(self, key: str, value: float, needed: float, reason: str) -> None:
        super().__init__(f"{key}: {value} would deadlock: {reason}; set it to at least {needed}")
        self.key = key
        self.value = value
        self.needed = needed


def check_capacity(run: RunConfig, config: SchedulerConfig) -> None:
    """Raise `CapacityError` (a `ValueError`) when one step's groups can never come together."""
    if 0 < config.max_buffered_groups < run.groups_per_step:
        raise CapacityError(
            "scheduler.max_buffered_groups",
            config.max_buffered_groups,
            run.groups_per_step,
            f"one optimizer step needs groups_per_step = {run.groups_per_step} groups at once",
        )
    least_bytes = run.groups_per_step * run.group_size * MIN_EPISODE_BYTES
    if config.max_buffered_bytes < least_bytes:
        raise CapacityError(
            "scheduler.max_buffered_bytes",
            config.max_buffered_bytes,
            least_bytes,
            f"the {run.groups_per_step * run.group_size} episodes of one optimizer step do not fit",
        )
    if config.min_valid > run.group_size:
        raise ValueError(
            f"scheduler.min_valid: {config.min_valid} can never be reached by groups of group_size = "
            f"{run.group_size}; lower it or raise group_size"
        )
    if config.eval_interim_groups > config.eval_groups:
        raise ValueError(
            f"scheduler.eval_interim_groups: {config.eval_interim_groups} is more than the set of "
            f"eval_groups = {config.eval_groups}, of which it takes the first ones: lower it, or raise "
            "eval_groups"
        )
