import pytest
from pydantic import ValidationError

from snaporch.config import Replica

AGE = "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kd8h2c4sqz9k0df"
SSH = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI" + "x" * 43


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
    ],
)
def test_anything_else_is_refused(key):
    with pytest.raises(ValidationError, match="must be a public key"):
        replica(key)
