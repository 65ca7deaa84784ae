"""The keys of `env_config` for `env_type: webshop`."""

from __future__ import annotations

from typing import Literal

from tailrace.config import Config

Split = Literal["train", "held_out", "all"]


class CatalogueArgs(Config, frozen=True, kw_only=True):
    """Which products there are, and what is asked for."""

    path: str = ""
    """A catalogue of yours (`.jsonl`, a product per line) or the published `items_shuffle.json`. Empty:
    a small catalogue is generated."""

    attributes_path: str = ""
    """With published data: `items_ins_v2.json`, attributes and instructions by product."""

    human_path: str = ""
    """With published data: `items_human_ins.json`, instructions that people wrote. If given, they
    alone are goals, else those of `attributes_path`."""

    num_products: int = 48
    """Products to generate; of a file: to read, from its start. 0: all of a file."""

    seed: int = 0
    """Fixes the generated products, the price limits of all goals, and which combinations of options
    are goals where a product has more than 24."""

    def __post_init__(self) -> None:
        if self.num_products < (0 if self.path else 1):
            raise ValueError("catalogue.num_products must be positive, or 0 for all of a file")
        is_public = self.path.endswith(".json")
        if self.path and not is_public and not self.path.endswith(".jsonl"):
            raise ValueError("catalogue.path must end with .jsonl (ours) or .json (published)")
        for key in ("attributes_path", "human_path"):
            if getattr(self, key) and not is_public:
                raise ValueError(f"catalogue.{key} needs a catalogue.path that ends with .json")


class WebShopConfig(Config, frozen=True, kw_only=True):
    """The keys of `env_config` for `env_type: webshop`."""

    catalogue: CatalogueArgs = CatalogueArgs()
    """The products."""

    split: Split = "train"
    """Which goals seeds choose from: `train`, `held_out` (never a train goal, a quarter) or `all`."""

    max_turns: int = 15
    """Replies after which the episode is truncated, with nothing bought."""

    items_per_page: int = 10
    """Products on one page of results."""

    max_results: int = 50
    """Products that a search finds, at most."""

    invalid_action_penalty: float = 0.0
    """Subtracted from the reward of a turn whose reply is no action that the page offers."""

    repeat_instruction: bool = True
    """Begin every page with the instruction, as published; false: only the first page that the policy
    sees has it, which saves tokens where it sees several."""

    instructions: bool = False
    """Begin the first observation with the rules, for models that do not know the game."""

    def __post_init__(self) -> None:
        for key in ("max_turns", "items_per_page", "max_results"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1")
        if self.invalid_action_penalty < 0:
            raise ValueError("invalid_action_penalty must not be negative: it is subtracted")
