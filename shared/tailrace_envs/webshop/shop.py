"""A shop: products, the index over them and the goals; built once per process and shared.

Invariant: what a seed asks for is a pure function of (catalogue, split, seed).
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from tailrace.config import ConfigError
from tailrace_envs.webshop.catalogue import Product, read_catalogue
from tailrace_envs.webshop.config import CatalogueArgs, Split
from tailrace_envs.webshop.generated import generate_products
from tailrace_envs.webshop.goals import Goal, make_goals
from tailrace_envs.webshop.public import read_public
from tailrace_envs.webshop.search import SearchIndex, words_of


class Shop:
    """Read-only; instances of the environment share it."""

    def __init__(self, products: tuple[Product, ...], goals: tuple[Goal, ...]) -> None:
        self.products = products
        self._by_asin = {product.asin: product for product in products}
        self._index = SearchIndex([product.text for product in products])
        self._goals: dict[Split, tuple[Goal, ...]] = {
            "all": goals,
            "train": tuple(goal for goal in goals if not goal.is_held_out),
            "held_out": tuple(goal for goal in goals if goal.is_held_out),
        }

    def goals_of(self, split: Split) -> tuple[Goal, ...]:
        """Goals of a split; `ConfigError` if there are none."""
        goals = self._goals[split]
        if not goals:
            raise ConfigError(
                f"split: this catalogue has no {split} goal ({len(self._goals['all'])} in all): give "
                "products attributes and a query, or instructions (published data: name "
                "attributes_path or human_path); or use split 'all'"
            )
        return goals

    def goal_for_seed(self, split: Split, seed: int) -> Goal:
        """Seeds walk through the goals, so `len(goals)` consecutive seeds give distinct goals."""
        goals = self.goals_of(split)
        return goals[seed % len(goals)]

    def find(self, query: str, max_results: int) -> tuple[Product, ...]:
        """What a search finds, best first."""
        return tuple(self.products[number] for number in self._index.find(query, max_results))

    def product(self, asin: str) -> Product:
        """The product with this id."""
        return self._by_asin[asin]


@lru_cache(maxsize=4)
def open_shop(args: CatalogueArgs) -> Shop:
    """The shop of a catalogue; `ConfigError` names key, file and remedy."""
    if not args.path:
        products = generate_products(args.num_products, args.seed)
    elif args.path.endswith(".json"):
        products = read_public(args)
    else:
        products = read_catalogue(Path(args.path), args.num_products)
    if not any(words_of(product.text) for product in products):
        raise ConfigError(
            f"catalogue.path: no product of {args.path} has a word to search for: give titles or "
            "descriptions with letters or digits"
        )
    only_given = args.path.endswith(".json")
    return Shop(products, make_goals(products, args.seed, only_given=only_given))
