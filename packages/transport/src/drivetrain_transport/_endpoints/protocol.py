"""What two endpoints may say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from types import UnionType
from typing import Any, get_args

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """The requests and replies of a conversation; either side may ask.

    Example:
        Protocol(requests=Generate | UpdateWeights, replies=Completion | WeightsState, version="3")

    Raises:
        ValueError: `requests` or `replies` is not a msgspec struct or a union of tagged ones, or `version` is empty.
    """

    requests: type[Any] | UnionType
    """A `msgspec.Struct`, or a union of structs made with tag=True."""

    replies: type[Any] | UnionType
    """The same, for what a handler returns."""

    version: str = "1"
    """Compared when two endpoints meet; they refuse each other when it differs. Change it with the structs."""

    def __post_init__(self) -> None:
        for field, kinds in (("requests", self.requests), ("replies", self.replies)):
            for kind in members(kinds):
                if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
                    raise ValueError(f"Protocol.{field} holds {kind!r}: each member must be a msgspec.Struct")
            try:
                msgspec.msgpack.Decoder(kinds, dec_hook=_never)
            except TypeError as error:
                raise ValueError(f"Protocol.{field} cannot be told apart on the wire, tag them: {error}") from error
        if not self.version:
            raise ValueError("Protocol.version is empty: give it a name such as '1'")


def members(kinds: type[Any] | UnionType) -> tuple[type[Any], ...]:
    """The types of a union, or the one type."""
    return get_args(kinds) or (kinds,)


def _never(kind: Any, obj: Any) -> Any:
    raise AssertionError(f"nothing is decoded here: {kind} {obj}")
