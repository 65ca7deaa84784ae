"""The published reward of a purchase (Yao et al. 2022, arXiv:2207.01206, section 3 and appendix):

    r = r_type * (|attributes met| + |options met| + [price <= limit])
               / (|attributes| + |options| + 1)

    r_type = 0     if the titles share no content word
             0.1   if they share less than 0.1 of the goal title's content words
             0.5   if they share at most 0.2, and neither query nor category matches
             1     otherwise

An attribute is met if the product has a similar attribute, or if its title, features or description
contain it. An option is met if a chosen value is similar. Two texts are similar if their rounded token
set ratio is above 85. Option values that contain a colour of `COLOURS` count as that colour. Shares are
of all content words of the goal's title, repeated ones counted. Queries match if they are equal and not
empty, categories if two parts of their paths are equal.

Differences between `tailrace_envs.webshop` (here) and the published code
(github.com/princeton-nlp/WebShop, there):

- Content words of a title: there the nouns that spaCy's tagger, another model, finds; here all words
  except a few function words, units and numbers.
- Price of a range: there drawn between its ends at every start; here the lower end.
- Price limits: same distribution, but `catalogue.seed` and the goal determine them here.
- Goals: there shuffled, 500 for tests, 1,000 for development; here a quarter of the products is held
  out, and searches of the train split do not show them. There all
  combinations of a product are goals, drawn by how rare their attributes are; here at most 24, drawn
  uniformly.
- Options: versions of that code differ (one requires exact sizes); here any chosen value may be similar
  to
  a required one, whatever the name of its option.
- Ratios: there by difflib unless python-Levenshtein is installed; here always as with
  python-Levenshtein.
- Case: ignored here; a few comparisons there depend on it.
- A value of two options: there it sets the last one; here the first one that is not chosen yet.
- Search: there Lucene's BM25 with stemming; here plain words, and no keywords such as `<r>`.
- Texts of pages and of instructions with options differ; published products have no reviews and ratings
  here.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from rapidfuzz import fuzz, utils

from tailrace_envs.webshop.catalogue import Product
from tailrace_envs.webshop.goals import Goal

MIN_RATIO = 85
_LATIN_1 = dict.fromkeys(range(128, 256))  # thefuzz drops these letters
_WORD = re.compile(r"[^\W\d_][\w'-]+")
_FUNCTION_WORDS = frozenset(
    _WORD.findall(
        "a an and are as at be by for from in is it of on or our that the this to up with your "
        "inch inches oz ounce lb count pack"
    )
)

_COLOUR_NAMES = """
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown
burgundy camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac
copper coral cranberry cream crystal dark denim eggplant elephant espresso fuchsia gold granite
grape graphite grass gray green grey heather indigo ivory ivy khaki lavender lemon leopard light
lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom mustard natural navy
nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire seashell
silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut
wheat white wine yellow
"""
COLOURS = tuple(_COLOUR_NAMES.split())  # published order; the first match counts


class PurchaseScore(NamedTuple):
    """Reward of a purchase with its parts, each 0 to 1."""

    reward: float
    type_score: float
    attribute_score: float
    option_score: float
    price_score: float


def score(goal: Goal, bought: Product, chosen: Iterable[str]) -> PurchaseScore:
    """Scores `bought` with the option values `chosen` against a goal."""
    colours = [base_colour(value) for value in chosen]
    num_attributes = sum(_has_attribute(bought, attribute) for attribute in goal.attributes)
    num_options = sum(
        any(is_similar(base_colour(value), one) for one in colours) for value in goal.values
    )
    is_cheap = bought.price <= goal.max_price
    wanted = len(goal.attributes) + len(goal.values) + 1
    type_score = score_type(goal.product, bought)
    return PurchaseScore(
        type_score * (num_attributes + num_options + is_cheap) / wanted,
        type_score,
        num_attributes / max(len(goal.attributes), 1),
        num_options / max(len(goal.values), 1),
        float(is_cheap),
    )


def score_type(wanted: Product, bought: Product) -> float:
    """Computes `r_type`."""
    words = title_words(wanted.title)
    share = len({*words} & {*title_words(bought.title)}) / len(words) if words else 0.2
    if share == 0.0:
        return 0.0
    if share < 0.1:
        return 0.1
    same_query = wanted.query != "" and wanted.query == bought.query
    return 1.0 if same_query or _same_category(wanted, bought) or share > 0.2 else 0.5


@lru_cache(maxsize=65_536)
def title_words(title: str) -> tuple[str, ...]:
    """Content words of a title, in its order."""
    return tuple(word for word in _WORD.findall(title.lower()) if word not in _FUNCTION_WORDS)


def is_similar(one: str, other: str) -> bool:
    """True if two texts share most words, in any order; one text may have further words."""
    ratio = fuzz.token_set_ratio(
        one.translate(_LATIN_1), other.translate(_LATIN_1), processor=utils.default_process
    )
    return round(ratio) > MIN_RATIO


def _same_category(one: Product, other: Product) -> bool:
    paths = ({part.strip() for part in product.product_category.split("›")} for product in (one, other))
    return len(set.intersection(*paths)) >= 2


def _has_attribute(product: Product, attribute: str) -> bool:
    if any(is_similar(one, attribute) for one in product.attributes):
        return True
    texts = (product.title, " ".join(product.features), product.description)
    return any(attribute.lower() in text.lower() for text in texts)


def base_colour(value: str) -> str:
    """First of `COLOURS` that an option value contains, also inside a word; else the value in lower
    case.

    `navy blue` and `light blue` are `blue`, `light purple` and `light red` are `light`.
    """
    value = value.lower()
    return next((colour for colour in COLOURS if colour in value), value)
