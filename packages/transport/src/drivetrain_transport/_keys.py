"""The keys of a run: one CURVE key pair in a folder that every host of the run can read, and nobody else.

CURVE encrypts a connection and proves the binding side to the connecting one. The other direction is proved by a token
derived from the secret, which travels inside the encrypted connection: a stranger who learns the public key alone
is refused.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

_FILE = "transport-key.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """A CURVE key pair, both halves in Z85 (40 characters). Whoever holds it is a member of the run."""

    public: bytes
    secret: bytes = field(repr=False)

    @property
    def token(self) -> str:
        """What a connecting endpoint shows to prove that it holds the secret."""
        return hashlib.blake2b(b"drivetrain-transport member", key=self.secret).hexdigest()


class _KeyFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    public: str
    secret: str


def make_keys(folder: str | Path) -> Keys:
    """Make a fresh key pair and write it to the folder, readable by its owner alone. The folder is made if missing.

    Raises:
        ValueError: The folder holds keys already.
    """
    path = Path(folder) / _FILE
    public, secret = zmq.curve_keypair()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ValueError(f"{path} exists: use load_keys, or remove it to make new keys") from None
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode(_KeyFile(public=public.decode(), secret=secret.decode())))
    return Keys(public=public, secret=secret)


def load_keys(folder: str | Path) -> Keys:
    """Read the keys that `make_keys` wrote to the folder.

    Raises:
        FileNotFoundError: There are none.
        ValueError: The file can be read by others than its owner, or holds no matching pair.
    """
    path = Path(folder) / _FILE
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise ValueError(f"{path} has mode {mode:04o}, others can read it: chmod 600 {path}")
    try:
        pair = msgspec.json.decode(path.read_bytes(), type=_KeyFile)
        keys = Keys(public=pair.public.encode("ascii"), secret=pair.secret.encode("ascii"))
        derived = zmq.curve_public(keys.secret)
    except (ValueError, zmq.ZMQError) as error:
        raise ValueError(f"{path} holds no keys: {error}") from error
    if derived != keys.public:
        raise ValueError(f"{path} holds a public key that is not the secret's: make the keys again")
    return keys
