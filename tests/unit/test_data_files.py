import pytest

from snaporch import data_files
from snaporch.data_files import shared_file
from snaporch.errors import UnavailableError


def test_in_a_checkout_it_is_beside_the_package():
    assert shared_file("templates/sanoid.conf.j2").is_file()


@pytest.mark.parametrize("library", ["lib/python3/dist-packages", "lib/python3.13/site-packages"])
def test_installed_it_is_in_share(tmp_path, monkeypatch, library):
    package = tmp_path / library / "snaporch"
    package.mkdir(parents=True)
    wanted = tmp_path / "share" / "snaporch" / "templates" / "x"
    wanted.parent.mkdir(parents=True)
    monkeypatch.setattr(data_files, "_PACKAGE", package)
    with pytest.raises(UnavailableError, match="install it again"):
        shared_file("templates/x")
    wanted.touch()
    assert shared_file("templates/x") == wanted
