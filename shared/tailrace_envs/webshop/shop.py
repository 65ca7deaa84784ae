"""Shop: products, their search index and the goals; built once per process and shared.

Invariant: the goal of a seed is a pure function of (catalogue, split, seed).
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path

import bm25s
import numpy as np

from tailrace.config import ConfigError
from tailrace_envs.splits import Split
from tailrace_envs.webshop.catalogue import Product, read_catalogue
from tailrace_envs.webshop.config import CatalogueArgs
from tailrace_envs.webshop.generated import generate_products
from tailrace_envs.webshop.goals import Goal, is_held_out_product, make_goals
from tailrace_envs.webshop.public import read_public

_WORD = re.compile(r"[^\W_]+(?:\.[0-9]+)?")


class Shop:
    """Products, index and goals. Read-only, because instances of the environment share it."""

    def __init__(self, products: tuple[Product, ...], goals: tuple[Goal, ...]) -> None:
        self.products = products
        self._index = SearchIndex([product.text for product in products])
        self._goals: dict[Split, tuple[Goal, ...]] = {
            "all": goals,
            "train": tuple(goal for goal in goals if not goal.is_held_out),
            "held_out": tuple(goal for goal in goals if goal.is_held_out),
        }

    def goals_of(self, split: Split) -> tuple[Goal, ...]:
        """Goals of a split; `ConfigError` if the split is empty."""
        goals = self._goals[split]
        if not goals:
            raise ConfigError(
                f"split: this catalogue has no {split} goal ({len(self._goals['all'])} in all): give "
                "products attributes and a query, or instructions (published data: name "
                "attributes_path or human_path); or use split 'all'"
            )
        return goals

    def goal_for_seed(self, split: Split, seed: int) -> Goal:
        """Goal of a seed. `len(goals)` consecutive seeds give distinct goals."""
        goals = self.goals_of(split)
        return goals[seed % len(goals)]

    def find(self, query: str, max_results: int, split: Split = "all") -> tuple[Product, ...]:
        """Searches for products, best first. With the train split, held-out products are hidden."""
        found = (self.products[number] for number in self._index.find(query))
        shown = (one for one in found if split != "train" or not is_held_out_product(one))
        return tuple(islice(shown, max_results))


@lru_cache(maxsize=4)
def open_shop(args: CatalogueArgs) -> Shop:
    """Opens the shop of a catalogue; `ConfigError` names key, file and remedy."""
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


class SearchIndex:
    """Finds texts by words with BM25 (bm25s). Texts of equal score keep their order.

    At least one text must contain a word.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._bm25 = bm25s.BM25()
        self._bm25.index([words_of(text) for text in texts], show_progress=False)
        self._known = set(self._bm25.vocab_dict)

    def find(self, query: str) -> list[int]:
        """Indices of the texts that contain any of the words, best first."""
        words = [word for word in words_of(query) if word in self._known]
        if not words:
            return []
        scores = np.asarray(self._bm25.get_scores(words))
        found = np.flatnonzero(scores > 0)
        order = np.argsort(-scores[found], kind="stable")
        return [int(number) for number in found[order]]


def words_of(text: str) -> list[str]:
    """Words and numbers of a text, in lower case."""
    return _WORD.findall(text.lower())
