import pytest

from snaporch.config import Replica, ResticReplica, load_config
from snaporch.errors import ConfigError

CLOUD = """
[replica.cloud]
engine = "restic"
password_file = "/etc/snaporch/password"
"""
TWIN = CLOUD.replace("cloud", "b") + 'repository = "s3:b"\n'
NAS = '[replica.nas]\nhost = "nas"\ndataset = "backup/kvm"\nbundles = "/backup"\n'


@pytest.fixture
def load(tmp_path):
    def loaded(text):
        path = tmp_path / "snaporch.toml"
        path.write_text(text)
        return load_config(path)

    return loaded


@pytest.mark.parametrize(
    "repository",
    ["/srv/copies", "s3:https://s3.example.org/b/p", "rest:https://me@nas/", "sftp:me@nas:/copies"],
)
def test_a_repository_is_a_replica(load, repository):
    config = load(f'{NAS}{CLOUD}repository = "{repository}"\n')
    assert isinstance(config.replica["cloud"], ResticReplica)
    assert isinstance(config.replica["nas"], Replica)
    assert list(config.zfs_replicas) == ["nas"]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("", "names neither repository"),
        ('repository = "s3:b"\nchain = -1\n', "replica.cloud.chain"),
        ('repository = "s3:b"\ndataset = "backup/kvm"\n', "replica.cloud.dataset"),
        ('repository = "copies"\n', "must begin with"),
        ('repository = "-r:x"\n', "must be a repository"),
        ('repository = "rest:http://me:hush@nas/"\n', "must not have a password"),
        ('environment_file = "relative"\n', "absolute path"),
        (f'repository = "s3:b"\n{TWIN}', "have the same repository"),
    ],
)
def test_what_is_no_repository_is_refused(load, more, reason):
    with pytest.raises(ConfigError, match=reason):
        load(CLOUD + more)


def test_an_unknown_engine_is_refused(load):
    with pytest.raises(ConfigError, match=r"replica\.nas\.engine: .*'rsync'"):
        load(NAS + 'engine = "rsync"\n')
