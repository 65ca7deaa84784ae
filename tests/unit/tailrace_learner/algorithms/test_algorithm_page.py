"""The page of algorithms says what the code says, and names can be chosen exactly as registered."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from tailrace.config import ConfigError, section_config
from tailrace_learner.config import CriticArgs, LearnerConfig, ReferenceArgs, StrategyArgs
from tailrace_learner.config_algorithm import SHARED
from tailrace_learner.config_registry import REGISTRIES
from tailrace_learner.core.algorithms import CORRECTIONS, ESTIMATORS, LOSSES, METRICS, OPTIMIZERS
from tailrace_learner.core.algorithms.losses import clip_cov, kl_cov
from tailrace_learner.core.algorithms.losses.kl_cov import num_picked

ROOT = Path(__file__).parents[4]
DOCS = ROOT / "docs"
ALGORITHMS = ROOT / "services" / "tailrace_learner" / "core" / "algorithms"
WITHOUT_DECLARATION = {"comparison", "shaping", "terminal_reward", "turn_sequences"}


def chosen(estimator: str) -> dict[str, Any]:
    """Settings that choose an estimator."""
    critic = {"critic": CriticArgs()} if estimator == "gae" else {}
    return {"adv_estimator": estimator, **critic}


def test_the_page_is_up_to_date() -> None:
    made = runpy.run_path(str(DOCS / "make_algorithms.py"))["page"]()
    assert (DOCS / "algorithms.md").read_text() == made, "make docs"


READERS = {
    key: (registry.key, registry.readers(key))
    for registry in REGISTRIES
    for key in LearnerConfig.__struct_fields__
    if key not in SHARED and registry.readers(key)
}


def test_every_file_of_an_algorithm_is_registered_under_its_name() -> None:
    beside = {"base", "spans", "sft", "value_clip", *WITHOUT_DECLARATION}
    for registry, folder in ((ESTIMATORS, "advantages"), (LOSSES, "losses")):
        files = {path.stem for path in (ALGORITHMS / folder).glob("[a-z]*.py")} - beside
        assert set(registry) == files
    for registry in (*REGISTRIES, OPTIMIZERS, METRICS):
        for name in registry:
            assert isinstance(registry[name], registry.kind)
        with pytest.raises(KeyError):
            registry["numpy:array"]


def test_what_an_estimator_compares_is_declared() -> None:
    needy = {name for name in ESTIMATORS if LearnerConfig(**chosen(name)).needs_two_members}
    assert needy == set(ESTIMATORS) - {"reinforce", "reinforce_plus_plus", "gae"}
    assert CORRECTIONS["none"].keys == set()


@pytest.mark.parametrize("name", ["grop", "rlo", "mean"])
def test_an_unknown_name_is_answered_with_the_nearest_and_the_form_of_ones_own(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        section_config({"learner": {"adv_estimator": name}}, "learner", LearnerConfig, "e.yaml")
    assert f"e.yaml: learner.adv_estimator: '{name}' is none of gae, gigpo, grpo" in str(caught.value)
    assert "my_module:NAME" in str(caught.value)


def other(key: str) -> object:
    """A valid value of a key that is not its default."""
    value = getattr(LearnerConfig(), key)
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return {
            "reward_grouping": "batch",
            "reward_norm": "mean",
            "correction_level": "sequence",
            "gae_unit": "turn",
            "zero_variance_groups": "redraw",
        }[key]
    if key == "cov_fraction":
        return 0.5
    return 2.0 if key == "dual_clip" else value * 0.9 if value else 0.5


@pytest.mark.parametrize("key", READERS)
def test_a_key_is_refused_where_nothing_reads_it_and_taken_where_something_does(key: str) -> None:
    selector, readers = READERS[key]
    settings = {key: other(key)}
    for chosen in readers:
        off_policy = selector == "loss" and LOSSES[chosen].off_policy
        extra: dict[str, object] = {"behaviour_correction": "none"} if off_policy else {}
        extra |= {"critic": CriticArgs()} if chosen == "gae" else {}
        LearnerConfig(**{selector: chosen, **settings, **extra})  # type: ignore[arg-type]
    strangers = {
        "adv_estimator": ("rloo", "reinforce"),
        "loss": ("vanilla_pg",),
        "behaviour_correction": ("none",),
    }
    stranger = next(name for name in strangers[selector] if name not in readers)
    with pytest.raises(ValueError, match=f"{key} is not read by {selector} '{stranger}'"):
        LearnerConfig(**{selector: stranger, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"loss": "topr"}, "behaviour_correction"),
        ({"dual_clip": 0.5}, "dual_clip"),
        ({"overlong_max_tokens": 5}, "overlong_buffer_tokens"),
        ({"overlong_max_tokens": 5, "overlong_buffer_tokens": 6}, "overlong_buffer_tokens"),
        ({"reward_clip": -1.0}, "reward_clip"),
        ({"adv_estimator": "reinforce", "gamma": 1.5}, "gamma"),
        ({"behaviour_correction": "icepop", "icepop_low": 6.0}, "icepop_low"),
        ({"loss": "sapo", "sapo_tau": 0.0}, "sapo_tau"),
        ({"ppo_epochs": 0}, "ppo_epochs"),
        ({"init_kl_coef": -0.1}, "init_kl_coef"),
        ({"kl_estimator": "k1"}, "kl_estimator"),
        ({"target_kl": 0.1}, "target_kl"),
        ({"init_kl_coef": 0.1, "kl_horizon": 5}, "target_kl"),
        ({"init_kl_coef": 0.1, "target_kl": 0.1, "kl_horizon": 0}, "kl_horizon"),
        ({"init_kl_coef": 0.1, "kl_in": "reward"}, "kl_in"),
        ({"kl_in": "reward", "adv_estimator": "reinforce"}, "kl_in is not read"),
        (
            {"loss": "grpo", "init_kl_coef": 0.1, "adv_estimator": "reinforce_plus_plus"},
            "set kl_in to loss",
        ),
        (
            {"adv_estimator": "starpo", "reward_grouping": "tags", "zero_variance_groups": "redraw"},
            "zero_variance_groups 'redraw' is not read .* reward_grouping 'tags'",
        ),
        (
            {"adv_estimator": "starpo", "reward_norm": "none", "zero_variance_groups": "redraw"},
            "zero_variance_groups 'redraw' is not read .* reward_norm 'none'",
        ),
        (
            {
                "adv_estimator": "gae",
                "critic": CriticArgs(),
                "zero_variance_groups": "redraw",
            },
            "zero_variance_groups is not read by adv_estimator 'gae'",
        ),
        (
            {"adv_estimator": "reinforce_plus_plus", "zero_variance_groups": "redraw"},
            "zero_variance_groups is not read by adv_estimator 'reinforce_plus_plus'",
        ),
        ({"loss": "kl_cov", "cov_fraction": 1.5}, "^cov_fraction must lie"),
        (
            {"loss": "grpo", "init_kl_coef": 0.1, "kl_in": "reward", "adv_estimator": "reinforce"},
            "use loss ppo_clip",
        ),
        ({"reference": ReferenceArgs()}, "init_kl_coef"),
        ({"adv_estimator": "gae"}, "learner.critic"),
        ({"critic": CriticArgs()}, "critic is not read"),
        (
            {
                "adv_estimator": "gae",
                "critic": CriticArgs(shared=True),
                "strategy_args": StrategyArgs(num_ranks=2),
            },
            "critic.shared with 2 ranks",
        ),
        ({"loss_aggregation": "seq_mean_token_sum_norm"}, "loss_norm_tokens"),
        ({"loss_norm_tokens": 512}, "loss_norm_tokens is not read by loss_aggregation 'token_mean'"),
    ],
)
def test_impossible_settings_name_the_key(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LearnerConfig(**settings)  # type: ignore[arg-type]


BOUNDS = {"tis_cap", "pg_clip_high", "cispo_clip_high", "icepop_high", "clip_cov_high"}
FLOATS = [
    key for key, hint in get_type_hints(LearnerConfig).items() if float in (hint, *get_args(hint))
]


@pytest.mark.parametrize("key", FLOATS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_number_is_finite_unless_it_is_an_upper_bound(key: str, value: float) -> None:
    reader = {READERS[key][0]: sorted(READERS[key][1])[0]} if key in READERS else {}
    if key in BOUNDS and value == math.inf:
        assert getattr(LearnerConfig(**{key: value, **reader}), key) == value  # type: ignore[arg-type]
        return
    with pytest.raises(ValueError, match=f"^{key} must be"):
        LearnerConfig(**{key: value, **reader})  # type: ignore[arg-type]


def test_numbers_of_nested_sections_are_finite() -> None:
    with pytest.raises(ValueError, match=r"critic\.value_clip must be a finite number"):
        CriticArgs(value_clip=math.inf)
    with pytest.raises(ValueError, match=r"strategy_args\.timeout_s must be a finite number"):
        StrategyArgs(timeout_s=math.inf)


def test_an_infinite_number_in_a_file_is_refused_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"e\.yaml: learner: init_kl_coef must be a finite number"):
        section_config({"learner": {"init_kl_coef": math.inf}}, "learner", LearnerConfig, "e.yaml")


def test_the_divergence_is_in_the_reward_of_reinforce_plus_plus_unless_it_is_said() -> None:
    def place(**settings: Any) -> str:
        return LearnerConfig(init_kl_coef=0.1, **settings).resolved_kl_in

    assert place(adv_estimator="reinforce_plus_plus") == "reward"
    assert place(adv_estimator="reinforce_plus_plus", kl_in="loss") == "loss"
    for name in ESTIMATORS.keys() - {"reinforce_plus_plus"}:
        critic = {"critic": CriticArgs()} if name == "gae" else {}
        assert place(adv_estimator=name, **critic) == "loss"


def test_the_share_of_picked_tokens_is_the_papers() -> None:
    assert num_picked(100_000, LearnerConfig(loss="clip_cov"), clip_cov.SHARE) == 20
    assert num_picked(100_000, LearnerConfig(loss="kl_cov"), kl_cov.SHARE) == 200
    own = LearnerConfig(loss="kl_cov", cov_fraction=0.1)
    assert num_picked(100_000, own, kl_cov.SHARE) == 10_000


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"value_clip": -1.0}, "critic.value_clip"),
        ({"critic_warmup": -1}, "critic.critic_warmup"),
        ({"shared": True, "pretrain": "gpt2"}, "critic.shared"),
        ({"value_loss_coef": 0.5}, "critic.value_loss_coef"),
    ],
)
def test_an_impossible_critic_names_the_key(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        CriticArgs(**settings)  # type: ignore[arg-type]


def test_what_waits_for_the_whole_step_is_said() -> None:
    assert LearnerConfig().waits_for_step == ""
    assert LearnerConfig(whiten_advantages=True).waits_for_step == "whiten_advantages"
    assert LearnerConfig(adv_estimator="reinforce_plus_plus").waits_for_step == "whiten_advantages"
    over_tags = LearnerConfig(adv_estimator="starpo", reward_grouping="tags")
    assert over_tags.waits_for_step == "reward_grouping"
    raw = LearnerConfig(adv_estimator="starpo", reward_grouping="tags", reward_norm="none")
    assert raw.waits_for_step == ""
