"""File format of a catalogue: JSON lines, one product per line, with the keys of `Product`.

Only `asin`, `title` and `price` are required. `asin` is the unique id of a product.
"""

import os
from pathlib import Path

import msgspec

from tailrace.config import ConfigError


class Instruction(msgspec.Struct, frozen=True, omit_defaults=True):
    """Wish of a shopper that this product fulfils."""

    text: str
    """Text of the wish, without options and price."""

    attributes: tuple[str, ...]
    """Required attributes, for example `machine washable`."""

    options: dict[str, str] | None = None
    """Required value of each option; `{}`: none. Left out: each combination of the product's values is
    a goal of its own."""


class Product(msgspec.Struct, frozen=True, omit_defaults=True):
    """Product of a catalogue."""

    asin: str
    title: str
    price: float
    """In dollars."""

    category: str = ""
    """Department, for example `garden`."""

    query: str = ""
    """Kind of product in shoppers' words, for example `desk lamp`."""

    product_category: str = ""
    """Path in the shop's category tree, its parts separated by ` › `."""

    options: dict[str, tuple[str, ...]] = {}
    """Values by option, for example `{"color": ["red", "blue"]}`."""

    attributes: tuple[str, ...] = ()
    description: str = ""
    features: tuple[str, ...] = ()
    reviews: tuple[str, ...] = ()
    rating: float = 0.0
    """0 to 5; 0: no rating."""

    instructions: tuple[Instruction, ...] = ()
    """Goals that this product fulfils; empty: one goal is made of query and attributes."""

    @property
    def text(self) -> str:
        """Text for the search engine, as published: title, description, first feature and options.

        Attributes and query are left out: no page shows them, and the reward depends on them.
        """
        options = (part for name, values in self.options.items() for part in (name, *values))
        return " ".join((self.title, self.description, *self.features[:1], *options))


def read_catalogue(path: Path, limit: int = 0) -> tuple[Product, ...]:
    """Reads the products of a JSONL file; `ConfigError` names file, line and error."""
    decoder = msgspec.json.Decoder(Product)
    products: dict[str, Product] = {}
    for number, line in enumerate(read_file(path, "catalogue.path").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            product = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}:{number}: is no product: {error}") from error
        if product.asin in products:
            raise ConfigError(f"{path}:{number}: asin {product.asin!r} occurs twice: rename one")
        products[product.asin] = product
        if len(products) == limit:
            break
    if not products:
        raise ConfigError(f"catalogue.path: {path} holds no product")
    return tuple(products.values())


def read_file(path: Path, key: str) -> bytes:
    """Reads the file that a key names."""
    try:
        return Path(os.path.expanduser(path)).read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from error
