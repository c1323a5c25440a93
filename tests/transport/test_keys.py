from pathlib import Path

import msgspec
import pytest
from drivetrain_transport import load_keys, make_keys


def test_keys_are_loaded_as_they_were_made_and_readable_by_the_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "keys"
    keys = make_keys(folder)
    assert load_keys(folder) == keys
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(keys.public) == len(keys.secret) == 40
    assert keys.secret.decode() not in repr(keys)


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    keys = make_keys(tmp_path)
    with pytest.raises(ValueError, match=r"exists: use load_keys"):
        make_keys(tmp_path)
    assert load_keys(tmp_path) == keys


def test_keys_that_others_can_read_are_refused(tmp_path: Path) -> None:
    make_keys(tmp_path)
    (file,) = tmp_path.iterdir()
    file.chmod(0o640)
    with pytest.raises(ValueError, match=r"mode 0640, others can read it: chmod 600"):
        load_keys(tmp_path)


def test_missing_and_broken_keys_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_keys(tmp_path)
    one, other = make_keys(tmp_path / "one"), make_keys(tmp_path / "other")
    (file,) = (tmp_path / "one").iterdir()
    for text, says in [
        ("{", "holds no keys"),
        ('{"public": "p"}', "holds no keys"),
        ('{"public": "p", "secret": "s"}', "holds no keys"),
        (f'{{"public": "{other.public.decode()}", "secret": "s"}}', "holds no keys"),
    ]:
        file.write_text(text)
        with pytest.raises(ValueError, match=says):
            load_keys(tmp_path / "one")
    file.write_bytes(msgspec.json.encode({"public": other.public.decode(), "secret": one.secret.decode()}))
    with pytest.raises(ValueError, match=r"public key that is not the secret's"):
        load_keys(tmp_path / "one")


def test_the_token_depends_on_the_secret_and_does_not_tell_it(tmp_path: Path) -> None:
    one, other = make_keys(tmp_path / "one"), make_keys(tmp_path / "other")
    assert one.token == load_keys(tmp_path / "one").token
    assert one.token != other.token
    assert one.secret.decode() not in one.token
