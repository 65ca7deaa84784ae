"""Catalogue files for tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from tailrace_envs.webshop.catalogue import Product


def write_catalogue(path: Path, products: Iterable[Product]) -> None:
    """Writes a JSONL file that `read_catalogue` reads."""
    path.write_bytes(b"".join(msgspec.json.encode(product) + b"\n" for product in products))
