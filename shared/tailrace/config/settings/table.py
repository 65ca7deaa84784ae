"""The whole table, by part."""

from __future__ import annotations

from tailrace.config.settings.actor_infer import ACTOR_INFER
from tailrace.config.settings.actor_train import ACTOR_TRAIN
from tailrace.config.settings.beside_policy import CRITIC, REFERENCE
from tailrace.config.settings.env_managers import TRAIN_ENV_MANAGER, VAL_ENV_MANAGER
from tailrace.config.settings.setting import Setting
from tailrace.config.settings.top_level import TOP_LEVEL

TABLES: dict[str, tuple[Setting, ...]] = {
    "At the top level": TOP_LEVEL,
    "actor_train": ACTOR_TRAIN,
    "actor_infer": ACTOR_INFER,
    "critic": CRITIC,
    "reference": REFERENCE,
    "train_env_manager": TRAIN_ENV_MANAGER,
    "val_env_manager": VAL_ENV_MANAGER,
}
"""The settings by the part of the page that lists them."""

SETTINGS: tuple[Setting, ...] = tuple(setting for part in TABLES.values() for setting in part)
"""All of them."""

ROOTS = frozenset(setting.name.partition(".")[0] for setting in SETTINGS)
"""Names that stand at the top level of an experiment."""
