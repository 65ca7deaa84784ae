"""Keys of `env_config` for `env_type: webshop`."""

from tailrace.config import Config
from tailrace_envs.rewards import check_rewards
from tailrace_envs.splits import Split


class CatalogueArgs(Config, frozen=True, kw_only=True):
    """Source of the products and of the goals."""

    path: str = ""
    """Your own catalogue (`.jsonl`, one product per line) or the published `items_shuffle.json`. Empty:
    a small catalogue is generated."""

    attributes_path: str = ""
    """With published data: `items_ins_v2.json`, attributes and instructions by product."""

    human_path: str = ""
    """With published data: `items_human_ins.json`, instructions that people wrote. If given, only they
    are goals, else those of `attributes_path`."""

    num_products: int = 48
    """Number of products to generate, or to read from the start of a file. 0: the whole file."""

    seed: int = 0
    """Seed of the generated products, of the price limits of all goals, and of the choice of goals
    where a product has more than 24 combinations of options."""

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
    """Source of the products and of the goals."""

    split: Split = "train"
    """Goals that seeds select from: `train`, `held_out` (those of a quarter of the products, which the
    searches of `train` never show) or `all`."""

    max_turns: int = 15
    """Replies after which the episode is truncated without a purchase."""

    items_per_page: int = 10
    """Number of products on one page of results."""

    max_results: int = 50
    """Maximum number of products that a search finds."""

    invalid_action_penalty: float = 0.0
    """Penalty that is subtracted from the reward of a reply without an action that the page offers."""

    reward_exponent: float = 1.0
    """Power of the published score that is the reward of a purchase. Above 1, a purchase that meets a
    part of the goal is worth less against one that meets all of it. Success does not depend on it."""

    repeat_instruction: bool = True
    """true: every page begins with the instruction, as published. false: only the first page that the
    policy sees has it, which saves tokens if the policy sees several pages."""

    instructions: bool = False
    """The first observation begins with the rules, for models that do not know the game."""

    def __post_init__(self) -> None:
        for key in ("max_turns", "items_per_page", "max_results"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1")
        if not self.reward_exponent > 0:
            raise ValueError("reward_exponent must be positive")
        check_rewards(self)
