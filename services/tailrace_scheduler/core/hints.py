"""Health hints: observations on a run that goes on, each with the setting to look at (pure).

A hint is one declaration in `HINTS`: a measure of what was seen, the value that raises it and the
lower value at which it no longer holds, so that it does not flap. A measure is None while too little
was seen; then the hint stays as it is.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from tailrace_protos.episode import Outcome
from tailrace_protos.event import EpisodeSettled, Event, GroupDropped, HintChanged, StepFinished

NUM_EPISODES = 128  # of a window, and of the beginning that it is compared with
NUM_STEPS = 10
NUM_COMPARED_STEPS = 5
_EPISODES_PER_LOOK = 32


class Window:
    """Mean of the newest values, and of the first ones."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: deque[float] = deque(maxlen=size)
        self._sum = 0.0
        self._first_sum = 0.0
        self._num_first = 0

    def add(self, value: float) -> None:
        """Add the newest value."""
        if len(self._values) == self._size:
            self._sum -= self._values[0]
        self._values.append(value)
        self._sum += value
        if self._num_first < self._size:
            self._num_first += 1
            self._first_sum += value

    @property
    def mean(self) -> float | None:
        """Mean of the newest values, once there are enough of them."""
        return self._sum / self._size if len(self._values) == self._size else None

    @property
    def first(self) -> float:
        """Mean of the first values."""
        return self._first_sum / self._num_first if self._num_first else 0.0


class Seen:
    """Numbers of the newest episodes and steps."""

    def __init__(self) -> None:
        self.num_turns, self.num_tool_calls = Window(NUM_EPISODES), Window(NUM_EPISODES)
        self.is_cut, self.is_failed = Window(NUM_EPISODES), Window(NUM_EPISODES)
        self.entropy = Window(NUM_COMPARED_STEPS)
        self.newest_failure = ""
        self.step = 0
        self._num_settled = 0
        self._limits: deque[str] = deque(maxlen=NUM_EPISODES)  # that ended episodes; "": none
        self._steps: deque[Mapping[str, float | None]] = deque(maxlen=NUM_STEPS)
        self._num_redrawn: deque[int] = deque([0], maxlen=NUM_STEPS + 1)  # groups, before each step

    def apply(self, event: Event) -> bool:
        """Take note of an event; True if it is time to look at the hints."""
        match event.body:
            case EpisodeSettled(phase="train") as body if body.outcome is not Outcome.CANCELLED:
                self._settled(body)
                self._num_settled += 1
                return self._num_settled % _EPISODES_PER_LOOK == 0
            case GroupDropped(reason="zero_variance"):
                self._num_redrawn[-1] += 1
            case StepFinished() as body:
                self._stepped(body)
                return True
        return False

    def _stepped(self, body: StepFinished) -> None:
        self.step = body.step
        self._steps.append(body.metrics)
        self._num_redrawn.append(0)
        if (entropy := body.metrics.get("entropy")) is not None:
            self.entropy.add(entropy)

    def limit(self) -> tuple[str, float]:
        """The limit that ended most of the newest episodes, and their share."""
        if len(self._limits) < NUM_EPISODES:
            return "", 0.0
        counts = Counter(name for name in self._limits if name)
        name, count = counts.most_common(1)[0] if counts else ("", 0)
        return name, count / NUM_EPISODES

    def mean(self, name: str) -> float | None:
        """Mean of a metric over the newest steps that have it, once there are enough."""
        values = [value for step in self._steps if (value := step.get(name)) is not None]
        return sum(values) / len(values) if len(values) >= NUM_COMPARED_STEPS else None

    def total(self, name: str) -> float:
        """Sum of a metric over the newest steps."""
        return sum(step.get(name) or 0.0 for step in self._steps)

    @property
    def num_steps(self) -> int:
        """Steps in the window."""
        return len(self._steps)

    @property
    def num_equal(self) -> float:
        """Groups with equal rewards in these steps: all where a step has one reward."""
        return sum(
            step.get("num_groups" if _has_one_reward(step) else "num_groups_zero_variance") or 0.0
            for step in self._steps
        )

    @property
    def num_redrawn(self) -> int:
        """Groups with equal rewards that were given back during these steps."""
        return sum(self._num_redrawn)

    @property
    def remedy_of_equal_groups(self) -> str:
        """Setting to change besides the tasks: groups may be drawn anew already."""
        if self.num_redrawn:
            return "or learner.entropy_loss_coef, as replies to a task are alike (or end the run)"
        if not self.total("num_groups_zero_variance"):  # the estimator compares no group
            return "or check the reward, which is the same in all episodes of a step"
        return "or set learner.zero_variance_groups: redraw"

    @property
    def remedy_of_failures(self) -> str:
        """Setting or log to look at, by the newest failure."""
        if self.newest_failure.startswith("reward:"):
            return "a slow reward needs a longer reward.rewards.*.timeout_s; see also reward*.log"
        if self.newest_failure.startswith("generation "):
            return (
                "see inference*.log; agents.max_generation_attempts is how long a call is tried again"
            )
        return "see agents*.log"

    @property
    def metric_names(self) -> Iterable[str]:
        """Metrics of the newest step."""
        return self._steps[-1].keys() if self._steps else ()

    def _settled(self, body: EpisodeSettled) -> None:
        self.is_failed.add(float(body.outcome is Outcome.INFRA_FAILURE))
        if body.outcome is Outcome.INFRA_FAILURE:
            self.newest_failure = body.reason
        if not body.outcome.is_valid:
            return
        self.num_turns.add(body.num_turns)
        if body.num_tool_calls >= 0:
            self.num_tool_calls.add(body.num_tool_calls)
        self.is_cut.add(float(body.num_cut_replies > 0))
        limit = body.reason.partition(":")[0] if body.outcome is Outcome.POLICY_FAILURE else ""
        self._limits.append(limit if limit in _LIMITS else "")


_LIMITS = {
    "max_turns": "agents.loop_args.max_turns (or max_turns of the environment)",
    "max_new_tokens": "agents.generating_args.max_new_tokens",
    "max_episode_tokens": "agents.max_episode_tokens",
    "engine_length": "what the engine takes: inference.kv_cache_tokens, inference.max_model_len",
}


def _has_one_reward(step: Mapping[str, float | None]) -> bool:
    """Tell whether all episodes of a step have the same reward, but for rounding."""
    deviation = step.get("reward_std")
    return deviation is not None and deviation <= 1e-9


def _share_lost(window: Window, at_least: float) -> float | None:
    """Share by which the newest mean lies below the first one, where that was large enough."""
    mean = window.mean
    return None if mean is None or window.first < at_least else 1.0 - mean / window.first


def _fewer_tool_calls(seen: Seen) -> float | None:
    return _share_lost(seen.num_tool_calls, 0.5)


def _few_turns(seen: Seen) -> float | None:
    mean = seen.num_turns.mean
    return None if mean is None or seen.num_turns.first < 2.0 else 1.0 / max(mean, 1.0)


def _equal_groups(seen: Seen) -> float | None:
    num_equal = seen.num_equal + seen.num_redrawn
    num_groups = seen.total("num_groups") + seen.num_redrawn
    return num_equal / num_groups if seen.num_steps >= NUM_COMPARED_STEPS and num_groups else None


def _low_entropy(seen: Seen) -> float | None:
    """At least 1 when it is a tenth of the first and below 0.05 nats."""
    mean = seen.entropy.mean
    if mean is None or seen.entropy.first <= 0:
        return None
    return min(0.1 * seen.entropy.first, 0.05) / max(mean, 1e-9)


def _high_entropy(seen: Seen) -> float | None:
    """At least 1 when it is twice the first and half a nat above it."""
    mean, first = seen.entropy.mean, seen.entropy.first
    if mean is None or first <= 0:
        return None
    return min(mean / (2.0 * first), (mean - first) / 0.5)


def _masked(seen: Seen) -> float | None:
    names = [name for name in seen.metric_names if name.endswith("_masked_fraction")]
    shares = [share for name in names if (share := seen.mean(name)) is not None]
    return max(shares, default=None)


def _stale(seen: Seen) -> float | None:
    num_stale = seen.total("num_stale_tokens")
    num_tokens = num_stale + seen.total("num_trained_tokens")
    return num_stale / num_tokens if seen.num_steps >= NUM_COMPARED_STEPS and num_tokens else None


def _skipped(seen: Seen) -> float | None:
    num_updates = seen.total("num_updates")
    return seen.total("num_skipped_updates") / num_updates if num_updates else None


class Hint(NamedTuple):
    """Declaration of a hint. `text` may name `value` and attributes of `seen`."""

    name: str
    measure: Callable[[Seen], float | None]
    raised_from: float
    holds_above: float
    text: str

    def __call__(self, seen: Seen, was_raised: bool) -> bool:
        """Tell whether the hint holds now."""
        value = self.measure(seen)
        if value is None:
            return was_raised
        return value > self.holds_above if was_raised else value >= self.raised_from

    def shown(self, seen: Seen) -> str:
        """The hint for the user."""
        return self.text.format(
            value=self.measure(seen) or 0.0, seen=seen, limit=_LIMITS.get(seen.limit()[0], "")
        )


HINTS = (
    Hint(
        "failing_episodes",
        lambda seen: seen.is_failed.mean,
        0.1,
        0.02,
        "{value:.0%} of the episodes fail outside of the model: {seen.remedy_of_failures}; the newest: "
        "{seen.newest_failure}",
    ),
    Hint(
        "no_tool_calls",
        _fewer_tool_calls,
        0.9,
        0.7,
        "tool calls fell from {seen.num_tool_calls.first:.2f} to {seen.num_tool_calls.mean:.2f} an "
        "episode: the model gives up its tools. Look at what the reward pays for, lower "
        "learner.training_args.learning_rate, or keep it near its start with learner.init_kl_coef",
    ),
    Hint(
        "few_turns",
        _few_turns,
        0.95,
        0.75,
        "episodes fell from {seen.num_turns.first:.1f} to {seen.num_turns.mean:.1f} turns: the model "
        "ends them at once. Look at what the reward pays for, and at penalties and learner.gamma, "
        "which make short episodes attractive",
    ),
    Hint(
        "equal_groups",
        _equal_groups,
        0.9,
        0.75,
        "{value:.0%} of the groups have equal rewards, which teach nothing: choose tasks that the "
        "model solves sometimes, raise group_size, {seen.remedy_of_equal_groups}",
    ),
    Hint(
        "cut_replies",
        lambda seen: seen.is_cut.mean,
        0.25,
        0.1,
        "in {value:.0%} of the episodes a reply is cut at its limit: raise max_tokens_per_step (of "
        "agents.custom_envs or agents.datasets) or agents.generating_args.max_new_tokens",
    ),
    Hint(
        "episode_limit",
        lambda seen: seen.limit()[1],
        0.25,
        0.1,
        "{value:.0%} of the episodes end at one limit: raise {limit}",
    ),
    Hint(
        "low_entropy",
        _low_entropy,
        1.0,
        0.6,
        "the policy's entropy fell from {seen.entropy.first:.3f} to {seen.entropy.mean:.3f} nats a "
        "token: it hardly explores. Raise learner.entropy_loss_coef or learner.pg_clip_high, or lower "
        "learner.training_args.learning_rate",
    ),
    Hint(
        "high_entropy",
        _high_entropy,
        1.0,
        0.6,
        "the policy's entropy rose from {seen.entropy.first:.3f} to {seen.entropy.mean:.3f} nats a "
        "token: its replies lose their form. Lower learner.entropy_loss_coef or "
        "learner.training_args.learning_rate",
    ),
    Hint(
        "engines_differ",
        lambda seen: seen.total("num_servers_beyond_mismatch"),
        1.0,
        0.0,
        "the log-probabilities of all inference servers differ from the learner's by more than "
        "learner.max_mismatch: give learner.model_args.dtype and inference.dtype one value, sample at "
        "one temperature, and compare engine and model with tailrace doctor --engine ... --model ...",
    ),
    Hint(
        "masked_tokens",
        _masked,
        0.3,
        0.15,
        "the correction masks {value:.0%} of the tokens: learner and engine differ much. Give both one "
        "dtype, lower max_staleness, or look at learner.behaviour_correction and "
        "learner.geometric_mask",
    ),
    Hint(
        "stale_tokens",
        _stale,
        0.3,
        0.15,
        "{value:.0%} of the sampled tokens are too old to be trained: raise max_staleness, or make "
        "episodes shorter",
    ),
    Hint(
        "skipped_updates",
        _skipped,
        0.3,
        0.1,
        "{value:.0%} of the updates are skipped because loss or gradients are not finite: lower "
        "learner.training_args.learning_rate, and check learner.model_args.dtype",
    ),
)


class HintBoard:
    """The hints that hold, and changes not told yet."""

    def __init__(self) -> None:
        self._seen = Seen()
        self._raised: dict[str, str] = {}  # name -> text
        self._num_changes: Counter[str] = Counter()
        self._untold: list[tuple[str, HintChanged]] = []

    def apply(self, event: Event) -> None:
        """Take note of an event."""
        if not self._seen.apply(event):
            return
        for hint in HINTS:
            was_raised = hint.name in self._raised
            is_raised = hint(self._seen, was_raised)
            if is_raised != was_raised:
                self._change(hint, is_raised)

    @property
    def raised(self) -> frozenset[str]:
        """Names of the hints that hold."""
        return frozenset(self._raised)

    @property
    def texts(self) -> tuple[str, ...]:
        """The hints that hold."""
        return tuple(self._raised.values())

    def take_changes(self) -> list[tuple[str, HintChanged]]:
        """Changes not taken yet, each with an id that no other change has."""
        taken, self._untold = self._untold, []
        return taken

    def _change(self, hint: Hint, is_raised: bool) -> None:
        text = hint.shown(self._seen)
        if is_raised:
            self._raised[hint.name] = text
        else:
            text = self._raised.pop(hint.name)
        self._num_changes[hint.name] += 1
        once = f"hint/{hint.name}/{self._num_changes[hint.name]}"
        self._untold.append((once, HintChanged(hint.name, is_raised, text, self._seen.step)))
