import msgspec
import pytest
from drivetrain_transport import Protocol


class Ask(msgspec.Struct, tag=True):
    x: int


class Tell(msgspec.Struct, tag=True):
    y: int


class Plain(msgspec.Struct):
    x: int


class AlsoPlain(msgspec.Struct):
    y: int


def test_unions_of_tagged_structs_and_single_structs_are_taken() -> None:
    assert Protocol(requests=Ask | Tell, replies=Plain).version == "1"


def test_members_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Protocol.replies cannot be told apart"):
        Protocol(requests=Ask, replies=Plain | AlsoPlain)


@pytest.mark.parametrize("kinds", [int, Ask | int, dict[str, int], Ask | None])
def test_members_must_be_structs(kinds: type) -> None:
    with pytest.raises(ValueError, match=r"Protocol.requests holds .* must be a msgspec.Struct"):
        Protocol(requests=kinds, replies=Tell)


def test_a_version_is_never_empty() -> None:
    with pytest.raises(ValueError, match=r"version is empty"):
        Protocol(requests=Ask, replies=Tell, version="")
