"""The catalogue's file format: JSON lines, a product per line, with the keys of `Product`.

Only `asin`, `title` and `price` are required. `asin` is the product's id and unique.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from tailrace.config import ConfigError


class Instruction(msgspec.Struct, frozen=True, omit_defaults=True):
    """What somebody wants of this product."""

    text: str
    """The wish in words, without options and price."""

    attributes: tuple[str, ...]
    """What it must have, for example `machine washable`."""

    options: dict[str, str] | None = None
    """Option values that must be chosen, by option; `{}`: none. Left out: combinations of the product's
    values are goals of their own."""


class Product(msgspec.Struct, frozen=True, omit_defaults=True):
    """One product."""

    asin: str
    title: str
    price: float
    """In dollars."""

    category: str = ""
    """Department, for example `garden`."""

    query: str = ""
    """The kind of thing in shoppers' words, for example `desk lamp`."""

    product_category: str = ""
    """Path in the shop's tree, parts separated by ` › `."""

    options: dict[str, tuple[str, ...]] = {}
    """Values by option, for example `{"color": ["red", "blue"]}`."""

    attributes: tuple[str, ...] = ()
    description: str = ""
    features: tuple[str, ...] = ()
    reviews: tuple[str, ...] = ()
    rating: float = 0.0
    """0 to 5; 0: nobody rated it."""

    instructions: tuple[Instruction, ...] = ()
    """Goals for which this product is right; none: one is made of query and attributes."""

    @property
    def text(self) -> str:
        """What the search engine reads, as published: title, description, first feature and options.
        Attributes and query are not in it: no page shows them, and rewards are made of them."""
        options = (part for name, values in self.options.items() for part in (name, *values))
        return " ".join((self.title, self.description, *self.features[:1], *options))


def read_catalogue(path: Path, limit: int = 0) -> tuple[Product, ...]:
    """Products of a JSONL file; `ConfigError` names file, line and what is wrong."""
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


def write_catalogue(path: Path, products: Iterable[Product]) -> None:
    """Write a JSONL file that `read_catalogue` reads."""
    path.write_bytes(b"".join(msgspec.json.encode(product) + b"\n" for product in products))


def read_file(path: Path, key: str) -> bytes:
    """The bytes of a file that a key names."""
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from error
