"""Reader of the published WebShop data.

`items_shuffle.json` (or its part of 1,000): a list of products with `asin`, `name`, `category`,
`query`, `product_category`, `pricing` ("$12.99", or "$10.00$20.00" for a range, whose lower end is used
here), `customization_options`, `small_description`, `full_description`. `items_ins_v2.json`:
`attributes`, `instruction` and `instruction_attributes` by asin. `items_human_ins.json`: by asin a list
of `instruction`, `instruction_attributes` and `instruction_options`; empty options mean that none is
required. Reviews and ratings are in another file, which is not read: `click[reviews]` shows none.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tailrace.config import ConfigError
from tailrace_envs.webshop.catalogue import Instruction, Product, read_file
from tailrace_envs.webshop.config import CatalogueArgs

UNKNOWN_PRICE = 100.0
MAX_ASIN = 10

_NUMBER = re.compile(r"\d[\d,]*\.?\d*")


def read_public(args: CatalogueArgs) -> tuple[Product, ...]:
    """Reads products in the file's order, without repeated ones and those without a usable asin."""
    raws = _json(args.path, "catalogue.path", list)
    annotations = _json(args.attributes_path, "catalogue.attributes_path", dict)
    human = _json(args.human_path, "catalogue.human_path", dict) if args.human_path else None
    products: dict[str, Product] = {}
    for index, raw in enumerate(raws[: args.num_products or None]):
        place = f"{args.path}[{index}]"
        asin = _asin(raw, place)
        if asin == "nan" or len(asin) > MAX_ASIN or asin in products:
            continue
        products[asin] = _annotated(asin, raw, annotations, human, place)
    if not products:
        raise ConfigError(f"catalogue.path: {args.path} holds no product")
    return tuple(products.values())


def _asin(raw: Any, place: str) -> str:
    if not isinstance(raw, dict) or not isinstance(raw.get("asin"), str):
        raise ConfigError(f"{place}: a product must be an object with 'asin'")
    return str(raw["asin"]).lower()


def _annotated(
    asin: str,
    raw: dict[str, Any],
    annotations: dict[str, Any],
    human: dict[str, Any] | None,
    place: str,
) -> Product:
    """Joins a product with its entries in the other files."""
    try:
        note = annotations.get(raw["asin"]) or {}
        if human is None:
            instructions = _generated_instruction(note)
        else:
            instructions = _human_instructions(human.get(raw["asin"], ()))
        return _product(asin, raw, note.get("attributes") or (), instructions)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{place}: product {asin} cannot be read ({type(error).__name__}: {error})"
        ) from error


def _product(
    asin: str, raw: dict[str, Any], attributes: Sequence[str], instructions: tuple[Instruction, ...]
) -> Product:
    return Product(
        asin=asin,
        title=raw["name"],
        price=price_of(raw.get("pricing") or ""),
        category=raw.get("category") or "",
        query=(raw.get("query") or "").lower().strip(),
        product_category=raw.get("product_category") or "",
        options=_options(raw.get("customization_options") or {}),
        attributes=tuple(attributes),
        description=" ".join(_texts(raw.get("full_description"))),
        features=_texts(raw.get("small_description")),
        instructions=instructions,
    )


def _texts(value: Any) -> tuple[str, ...]:
    """Texts of a value that is one text, several, or none."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def price_of(pricing: str) -> float:
    """Lower end of a price in dollars; `UNKNOWN_PRICE` without a number."""
    found = _NUMBER.search(pricing)
    return float(found.group().replace(",", "")) if found else UNKNOWN_PRICE


def _options(raw: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Values in lower case, with bars instead of slashes, as in the published code."""
    return {
        name.lower(): tuple(
            dict.fromkeys(one["value"].strip().replace("/", " | ").lower() for one in values)
        )
        for name, values in raw.items()
        if values
    }


def _generated_instruction(note: Mapping[str, Any]) -> tuple[Instruction, ...]:
    """Instruction that comes with a product's attributes; it leaves the options open."""
    attributes = tuple(note.get("instruction_attributes") or ())
    text = note.get("instruction")
    return (Instruction(_wording(text), attributes),) if text and attributes else ()


def _human_instructions(raws: Sequence[Mapping[str, Any]]) -> tuple[Instruction, ...]:
    """Instructions that people wrote; only options that they name are required."""
    return tuple(
        Instruction(_wording(raw["instruction"]), attributes, _chosen(raw))
        for raw in raws
        if (attributes := tuple(raw.get("instruction_attributes") or ()))
    )


def _wording(instruction: str) -> str:
    return instruction.strip(". ")


def _chosen(raw: Mapping[str, Any]) -> dict[str, str]:
    """Options by name; some instructions of the published file list values without names."""
    options = raw.get("instruction_options") or {}
    if isinstance(options, dict):
        return {name.lower(): value.lower() for name, value in options.items()}
    return {f"option {number}": value.lower() for number, value in enumerate(options, start=1)}


def _json(path: str, key: str, kind: type[Any]) -> Any:
    if not path:
        return kind()
    try:
        content = msgspec.json.decode(read_file(Path(path), key))
    except msgspec.DecodeError as error:
        raise ConfigError(f"{key}: {path} is not valid JSON: {error}") from error
    if not isinstance(content, kind):
        raise ConfigError(f"{key}: {path} must hold a {kind.__name__} at the top: is it another file?")
    return content
