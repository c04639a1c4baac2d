import pytest

from snaporch.hypervisor.apparmor import denies_writing

UUID = "7f1c0d4e-4f7d-4a6e-9d0a-0d7c5a1b2c3d"
LINES = """  "/overlays/r/vda.qcow2" rwk,
  "{base}" rk,
  # don't audit writes to readonly files
  deny "{base}" w,
"""


@pytest.fixture
def base(tmp_path):
    path = tmp_path / "web.img"
    path.touch()
    (tmp_path / f"libvirt-{UUID}.files").write_text(LINES.format(base=path))
    return path


def test_a_base_that_is_denied(base, tmp_path):
    assert denies_writing(UUID, str(base), tmp_path)


def test_a_profile_names_the_target_of_a_link(base, tmp_path):
    (tmp_path / "link").symlink_to(base)
    assert denies_writing(UUID, str(tmp_path / "link"), tmp_path)


def test_other_images_and_guests_are_not_denied(base, tmp_path):
    assert not denies_writing(UUID, "/overlays/r/vda.qcow2", tmp_path)
    assert not denies_writing(UUID.replace("7", "8"), str(base), tmp_path)
