import re
from pathlib import Path

import pytest

from snaporch.data_files import pages_directory, shared_file
from snaporch.errors import UnavailableError


def test_in_a_checkout_it_is_beside_the_package():
    assert shared_file("templates/sanoid.conf.j2").is_file()


@pytest.mark.parametrize("library", ["lib/python3/dist-packages", "lib/python3.13/site-packages"])
def test_installed_it_is_in_share(tmp_path, library):
    package = tmp_path / library / "snaporch"
    package.mkdir(parents=True)
    wanted = tmp_path / "share" / "snaporch" / "templates" / "x"
    wanted.parent.mkdir(parents=True)
    with pytest.raises(UnavailableError, match="install it again"):
        shared_file("templates/x", package)
    wanted.touch()
    assert shared_file("templates/x", package) == wanted


def test_installed_pages_are_in_share_doc(tmp_path):
    package = tmp_path / "lib/python3/dist-packages/snaporch"
    package.mkdir(parents=True)
    assert pages_directory(package) is None
    pages = tmp_path / "share/doc/snaporch"
    (pages / "docs/how-to").mkdir(parents=True)
    (pages / "docs/how-to/recovery.md").touch()
    assert pages_directory(package) == pages


def test_every_page_that_a_message_names_is_installed():
    top = Path(__file__).resolve().parents[2]
    assert pages_directory() == top
    texts = [path.read_text("utf-8") for path in (top / "snaporch").rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"docs/[\w./-]+\.md", text)}
    assert "docs/how-to/recovery.md" in named
    assert [name for name in sorted(named) if not (top / name).is_file()] == []
    installed = (top / "setup.cfg").read_text("utf-8")
    for folder in {str(Path(name).parent) for name in named}:
        assert f"share/doc/snaporch/{folder} =\n    {folder}/*\n" in installed
