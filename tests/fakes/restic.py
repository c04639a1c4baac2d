"""The command ``restic``, without encryption: what snaporch uses of it.

``put_in(directory)`` makes an executable of it there. A repository is a directory with
``config``. If it has ``fail-COMMAND``, this command fails as often as the number in that.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

MIGHT_BE_READ = b"encrypted: "


def put_in(directory: Path) -> Path:
    """Make the command; return its path."""
    path = directory / "restic"
    path.write_text(f"#!{sys.executable} -S\n{Path(__file__).read_text()}")
    path.chmod(0o755)
    return path


def _fail(text: str) -> int:
    sys.stderr.write(f"{text}\n")
    return 1


def _options(words: list[str]) -> tuple[list[str], list[str], dict[str, str]]:
    """The tags, the other words, and options with a value."""
    tags, rest, options, given = [], [], {}, iter(words)
    for word in given:
        if word == "--tag":
            tags += next(given).split(",")
        elif word in ("--stdin-filename", "--limit-upload"):
            options[word] = next(given)
        elif word.startswith("--"):
            options[word] = ""
        else:
            rest.append(word)
    return tags, rest, options


def _listing(repository: Path, tags: list[str]) -> list[dict[str, object]]:
    found = [json.loads(path.read_text()) for path in (repository / "snapshots").glob("*")]
    found = [each for each in found if set(tags) <= set(each["tags"])]
    return sorted(found, key=lambda each: each["time"])


def _backup(repository: Path, tags: list[str], rest: list[str], options: dict[str, str]) -> int:
    if "--stdin" in options:
        data = sys.stdin.buffer.read()
        if not data:
            return _fail("Fatal: unable to save snapshot: snapshot is empty")
        files = {f"/{options['--stdin-filename'].lstrip('/')}": data}
    else:
        paths = [path for path in Path(rest[0]).rglob("*") if path.is_file()]
        files = {str(path): path.read_bytes() for path in paths}
    names = {}
    for name, data in files.items():
        digest = hashlib.sha256(data).hexdigest()
        if not (repository / "data" / digest).exists():  # damaged data stays
            (repository / "data" / digest).write_bytes(MIGHT_BE_READ + data)
        names[name] = digest
    time = datetime.now(UTC).isoformat().replace("+00:00", "000Z")
    entry = {"time": time, "tags": tags, "files": names, "paths": sorted(names)}
    text = json.dumps(entry)
    number = hashlib.sha256(text.encode()).hexdigest()
    (repository / "snapshots" / number).write_text(json.dumps({**entry, "id": number}))
    return 0


def _dump(repository: Path, tags: list[str], number: str, path: str) -> int:
    found = _listing(repository, tags)
    found = found[-1:] if number == "latest" else [e for e in found if e["id"] == number]
    if not found or path not in found[0]["files"]:  # type: ignore[operator]
        return _fail(f"Fatal: cannot dump file: {path} not found")
    digest = found[0]["files"][path]  # type: ignore[index]
    data = (repository / "data" / digest).read_bytes().removeprefix(MIGHT_BE_READ)
    if hashlib.sha256(data).hexdigest() != digest:
        return _fail("cannot dump file: decrypting blob failed: ciphertext verification failed")
    sys.stdout.buffer.write(data)
    return 0


def _forget(repository: Path, numbers: list[str]) -> int:
    for number in numbers:
        if (repository / "append-only").exists():
            _fail(f"unable to remove {number} from the repository")  # restic before 0.17
        else:
            (repository / "snapshots" / number).unlink(missing_ok=True)
    return 0


def _prune(repository: Path) -> int:
    listing = _listing(repository, [])
    used = {name for each in listing for name in each["files"].values()}  # type: ignore[attr-defined]
    for path in (repository / "data").iterdir():
        if path.name not in used:
            path.unlink()
    return 0


def main(words: list[str]) -> int:
    """Run the command; return its exit status."""
    repository = Path(os.environ["RESTIC_REPOSITORY"])
    Path(os.environ["RESTIC_PASSWORD_FILE"]).read_text()
    tags, rest, options = _options(words[1:])
    if words[0] == "init":
        for name in ("data", "snapshots"):
            (repository / name).mkdir(parents=True)
        (repository / "config").write_text("{}")
        return 0
    if (failing := repository / f"fail-{words[0]}").exists():
        left = int(failing.read_text())
        failing.write_text(str(max(left - 1, 0)))
        if left:
            return _fail("Fatal: no server")
    if not (repository / "config").exists():
        return _fail("Fatal: unable to open config file: no such file\nIs there a repository?")
    commands = {
        "backup": lambda: _backup(repository, tags, rest, options),
        "snapshots": lambda: print(json.dumps(_listing(repository, tags))) or 0,
        "dump": lambda: _dump(repository, tags, rest[0], rest[1]),
        "forget": lambda: _forget(repository, rest),
        "prune": lambda: _prune(repository),
        "cat": lambda: 0,
    }
    return commands[words[0]]() if words[0] in commands else _fail(f"unknown command {words[0]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
