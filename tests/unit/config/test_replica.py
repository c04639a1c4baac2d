import pytest
from pydantic import ValidationError

from snaporch.config import Replica

AGE = "age1ajz780t2kcxg3l0z9eg36rnerhw8sk2hktzglpjykqdwty3v95jssphmn0"
SSH = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA" + "x" * 42


def replica(*recipients):
    document = {"dataset": "b/k", "bundles": "/b", "encrypt_to": list(recipients)}
    return Replica.model_validate(document)


@pytest.mark.parametrize("key", [AGE, SSH, f"{SSH} admin@desk.example"])
def test_public_keys_are_accepted(key):
    assert replica(key).encrypt_to == (key,)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "-",
        AGE.upper(),
        AGE[:-1],
        f"{AGE} ",
        f"{AGE}\n",
        f"{SSH}\n{SSH}",
        "AGE-SECRET-KEY-1" + "Q" * 58,
        "ssh-rsa AAAA",
        "/root/recipients.txt",
        f"{SSH} a b",
        f"{SSH[:-50]}x{SSH[-49:]}",
    ],
)
def test_anything_else_is_refused(key):
    with pytest.raises(ValidationError, match="must be a public key"):
        replica(key)


@pytest.mark.parametrize("place", range(4, 62))
def test_a_mistyped_character_is_refused(place):
    other = "q" if AGE[place] != "q" else "p"
    with pytest.raises(ValidationError, match="with the right checksum"):
        replica(f"{AGE[:place]}{other}{AGE[place + 1 :]}")


def test_two_exchanged_characters_are_refused():
    with pytest.raises(ValidationError, match="with the right checksum"):
        replica(AGE.replace("ajz", "jaz"))


def test_the_key_of_another_kind_with_its_checksum_is_refused():
    with pytest.raises(ValidationError, match="must be a public key"):
        replica("bc1qar0srrr7xfkvy5l643lydnw9re59gtzzwf5mdq")
