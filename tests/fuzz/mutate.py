"""Structure-aware inputs: values of a message type, some of them hostile, and damaged bytes of them.

Everything follows from the random generator, so a target, a seed and an index name one input.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import msgspec
from msgspec import inspect

INTS = (0, 1, -1, 7, 2**31 - 1, 2**31, -(2**31), 2**53, 2**63 - 1, -(2**63), 2**64 - 1)
HUGE_INTS = (2**64, -(2**63) - 1, 10**40)  # JSON only: msgpack has 64 bits
FLOATS = (0.0, -1.0, 0.5, float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 5e-324, -0.0)
TEXTS = (
    "",
    "x",
    "g0.0",
    "0",
    "-1",
    "\x00",
    "a.b.*.>",
    "../../etc",
    "\n\r",
    "𝕏\u202e\ufeff",
    "e" * 3000,
    "{}",
)
_DEEP = b"\x91" * 3000
_MAX_DEPTH = 6


class Chooser(Random):
    """Random generator of one input: many inputs are nearly valid, so that they reach the code behind.

    `hostile`: share of leaves with a hostile value of the right type; a tenth of it of another type.
    """

    hostile = 0.0

    @classmethod
    def of(cls, name: str) -> Chooser:
        """Makes the generator of a named input."""
        made = cls(name)
        made.hostile = made.choice((0.0, 0.03, 0.2))
        return made


Make = Callable[[Chooser, int], Any]


@cache
def maker(kind: Any) -> Make:
    """Returns a function that makes plain values (dicts, lists, numbers) of a type."""
    return _maker(inspect.type_info(kind))


def _maker(info: inspect.Type) -> Make:
    for known, build in _BUILDERS.items():
        if isinstance(info, known):
            make = build(info)
            return lambda rng, depth: (
                _anything(rng, depth) if rng.random() < rng.hostile / 10 else make(rng, depth)
            )
    return _anything


def _anything(rng: Chooser, depth: int) -> Any:
    choice = rng.randrange(8 if depth < _MAX_DEPTH else 6)
    if choice == 6:
        return [_anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    if choice == 7:
        return {rng.choice(TEXTS): _anything(rng, depth + 1) for _ in range(rng.randrange(4))}
    plain = (None, rng.choice(INTS), rng.choice(FLOATS), rng.choice(TEXTS), True, rng.randbytes(5))
    return plain[choice]


def _int(_: Any) -> Make:
    return lambda rng, _: rng.choice(INTS) if rng.random() < rng.hostile else rng.randrange(64)


def _float(_: Any) -> Make:
    return lambda rng, _: rng.choice(FLOATS) if rng.random() < rng.hostile else rng.random()


def _text(_: Any) -> Make:
    return lambda rng, _: (
        rng.choice(TEXTS) if rng.random() < rng.hostile else rng.choice(("g0.0", "w", "train-0"))
    )


def _bytes(_: Any) -> Make:
    return lambda rng, _: rng.randbytes(
        rng.choice((1, 3, 7, 64)) if rng.random() < rng.hostile else 4 * rng.randrange(5)
    )


def _literal(info: Any) -> Make:
    return lambda rng, _: rng.choice(info.values)


def _enum(info: Any) -> Make:
    return lambda rng, _: rng.choice(list(info.cls)).value


def _union(info: Any) -> Make:
    makes = [_maker(one) for one in info.types]
    return lambda rng, depth: rng.choice(makes)(rng, depth)


def _list(info: Any) -> Make:
    make = _maker(info.item_type)
    return lambda rng, depth: (
        [make(rng, depth + 1) for _ in range(rng.randrange(4))] if depth < _MAX_DEPTH else []
    )


def _fixed(info: Any) -> Make:
    makes = [_maker(one) for one in info.item_types]
    return lambda rng, depth: [make(rng, depth + 1) for make in makes]


def _dict(info: Any) -> Make:
    key, value = _maker(info.key_type), _maker(info.value_type)

    def make(rng: Chooser, depth: int) -> dict[Any, Any]:
        if depth >= _MAX_DEPTH:
            return {}
        made = [(key(rng, depth + 1), value(rng, depth + 1)) for _ in range(rng.randrange(4))]
        return {one: two for one, two in made if isinstance(one, str)}

    return make


def _struct(info: Any) -> Make:
    fields = [(field.encode_name, _later(field.type), field.required) for field in info.fields]

    def make(rng: Chooser, depth: int) -> Any:
        given = [
            (name, child(rng, depth + 1))
            for name, child, required in fields
            if rng.random() > (rng.hostile / 20 if required else 0.4) or info.array_like
        ]
        if info.array_like:
            tag = [] if info.tag is None else [info.tag]
            return tag + [value for _, value in given][: rng.randrange(4 * len(given)) + 1]
        named: dict[Any, Any] = {} if info.tag is None else {info.tag_field: info.tag}
        if rng.random() < rng.hostile / 5:
            named[rng.choice(TEXTS)] = _anything(rng, depth)
        return named | dict(given)

    return make


def _later(info: inspect.Type) -> Make:
    """A maker that is built at its first use: types may contain themselves."""
    built: list[Make] = []

    def make(rng: Chooser, depth: int) -> Any:
        if not built:
            built.append(_maker(info))
        return built[0](rng, depth)

    return make


_BUILDERS: dict[Any, Callable[[Any], Make]] = {
    inspect.IntType: _int,
    inspect.FloatType: _float,
    inspect.StrType: _text,
    inspect.BytesType: _bytes,
    inspect.ByteArrayType: _bytes,
    inspect.MemoryViewType: _bytes,
    inspect.BoolType: lambda _: lambda rng, _: rng.random() < 0.5,
    inspect.NoneType: lambda _: lambda rng, _: None,
    inspect.LiteralType: _literal,
    inspect.EnumType: _enum,
    inspect.UnionType: _union,
    inspect.VarTupleType: _list,
    inspect.ListType: _list,
    inspect.TupleType: _fixed,
    inspect.DictType: _dict,
    inspect.StructType: _struct,
}


def as_msgpack(value: Any) -> bytes:
    """Encodes a made value."""
    return msgspec.msgpack.encode(value)


def as_json(value: Any, rng: Chooser) -> bytes:
    """Encodes a made value; some numbers become larger than 64 bits, some NaN and Infinity."""
    data = msgspec.json.encode(value)
    if rng.random() < rng.hostile:
        data = data.replace(b":1", b":%d" % rng.choice(HUGE_INTS), 1)
    if rng.random() < rng.hostile:
        data = data.replace(b"null", rng.choice((b"NaN", b"Infinity", b"1e999")), 1)
    return data


def damaged(data: bytes, rng: Chooser) -> bytes:
    """Changes one to three places of an encoded value."""
    for _ in range(rng.randrange(1, 4)):
        data = _DAMAGES[rng.randrange(len(_DAMAGES))](data, rng.randrange(len(data) + 1), rng)
    return data


_DAMAGES: tuple[Callable[[bytes, int, Chooser], bytes], ...] = (
    lambda data, at, rng: data[:at],
    lambda data, at, rng: data[at:],
    lambda data, at, rng: data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:],
    lambda data, at, rng: data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
    lambda data, at, rng: data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
    lambda data, at, rng: data[:at] + data[at // 2 : at] + data[at:],
    lambda data, at, rng: data[:at] + rng.choice((b"\xdd", b"\xdf", b"\xc6")) + b"\xff" * 4 + data[at:],
    lambda data, at, rng: data[:at] + (_DEEP if rng.random() < 0.05 else b"\xc1") + data[at:],
)
