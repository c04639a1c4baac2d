"""Turn the checkout's snaporch into what a lab installs: a wheel, unpacked.

Cached by the content of everything the wheel is made from, so that a run
after an unchanged one costs a few milliseconds.
"""

import configparser
import fcntl
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

# What the build may read: these, and files at the top which setup.cfg may name.
SOURCES = ("snaporch", "hooks", "templates", "setup.cfg", "pyproject.toml", "setup.py")
TOP = ("README*", "LICENSE*", "COPYING*", "CHANGELOG*", "MANIFEST.in")

SCRIPT = """#!/usr/bin/python3
import sys
from {module} import {function}
sys.exit({call}())
"""


class BuildError(Exception):
    """The wheel could not be built; the text says where the log is."""


def sources(checkout):
    """The files the wheel is made from, sorted, relative to CHECKOUT."""
    found = []
    for name in SOURCES:
        path = checkout / name
        if path.is_dir():
            found += (f for f in path.rglob("*") if f.is_file())
        elif path.is_file():
            found.append(path)
    for pattern in TOP:
        found += (f for f in checkout.glob(pattern) if f.is_file())
    return sorted(
        f.relative_to(checkout)
        for f in found
        if "__pycache__" not in f.parts and f.suffix != ".pyc"
    )


def digest(checkout, files):
    total = hashlib.sha256(Path(__file__).read_bytes())
    for name in files:
        content = (checkout / name).read_bytes()
        total.update(f"{name}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()[:16]


def prepare(checkout, cache):
    """Return the directory with ``snaporch.tar``, or None without a package.

    :param checkout: the checkout's top directory
    :param cache: the lab's cache directory
    :raises BuildError: when pip fails
    """
    if not (checkout / "setup.cfg").exists() or not (checkout / "snaporch").is_dir():
        return None
    files = sources(checkout)
    final = cache / "snaporch" / digest(checkout, files)
    if (final / "snaporch.tar").exists():
        os.utime(final)
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with open(cache / "snaporch" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (final / "snaporch.tar").exists():
            _build(checkout, files, final, cache)
            _forget(final.parent, keep=8)
    return final


def _forget(directory, keep):
    """Drop all but the KEEP wheels used last."""
    old = sorted(
        (d for d in directory.iterdir() if d.is_dir() and "." not in d.name),
        key=lambda d: d.stat().st_mtime,
        reverse=True,
    )
    for each in old[keep:]:
        shutil.rmtree(each, ignore_errors=True)


def _build(checkout, files, final, cache):
    (cache / "logs").mkdir(exist_ok=True)
    log = cache / "logs" / "wheel.log"
    log.write_text("")
    with tempfile.TemporaryDirectory(dir=final.parent, prefix="build.") as work:
        # A copy, because setuptools leaves build/ and egg-info behind.
        tree = Path(work) / "tree"
        for name in files:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkout / name, tree / name)
        wheels = Path(work) / "wheel"
        _run(
            [
                str(_venv(cache, log) / "bin" / "pip"),
                "wheel",
                "--no-deps",
                "--no-build-isolation",
                f"--wheel-dir={wheels}",
                str(tree),
            ],
            log,
        )
        result = Path(work) / "result"
        result.mkdir()
        (wheel,) = wheels.glob("*.whl")
        _unpack(wheel, result / "snaporch.tar")
        result.rename(final)


def _venv(cache, log):
    """A virtual environment of the lab's own that can build wheels."""
    venv = cache / "venv"
    if not (venv / "complete").exists():
        shutil.rmtree(venv, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(venv)], log)
        _run([str(venv / "bin" / "pip"), "install", "setuptools>=68", "wheel"], log)
        (venv / "complete").touch()
    return venv


def _run(words, log):
    with open(log, "ab") as out:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        raise BuildError(f"failed: {words[0]} {words[1]} (log: {log})")


def _unpack(wheel, target):
    """Write the wheel's content as a tar: ``site/`` and ``local/``.

    ``site`` goes to the interpreter's dist-packages, ``local`` to /usr/local.
    """
    with zipfile.ZipFile(wheel) as source, tarfile.open(target, "w") as tar:
        for entry in source.infolist():
            if entry.is_dir():
                continue
            name, mode = _place(entry.filename)
            mode = mode or (0o755 if entry.external_attr >> 16 & 0o100 else 0o644)
            _add(tar, name, source.read(entry), mode)
            if entry.filename.endswith(".dist-info/entry_points.txt"):
                for script, text in _scripts(source.read(entry).decode()):
                    _add(tar, f"local/bin/{script}", text.encode(), 0o755)


def _place(name):
    """Where a wheel's file goes, and its mode when the place implies one."""
    top, _, rest = name.partition("/")
    if not top.endswith(".data"):
        return f"site/{name}", None
    kind, _, rest = rest.partition("/")
    if kind in ("purelib", "platlib"):
        return f"site/{rest}", None
    if kind == "scripts":
        return f"local/bin/{rest}", 0o755
    return f"local/{rest}", None  # "data"


def _scripts(text):
    points = configparser.ConfigParser(delimiters=("=",))
    points.optionxform = str
    points.read_string(text)
    if not points.has_section("console_scripts"):
        return
    for name, target in points["console_scripts"].items():
        module, _, call = target.split("[")[0].strip().partition(":")
        function = call.split(".")[0]
        yield name, SCRIPT.format(module=module, function=function, call=call)


def _add(tar, name, content, mode):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    info.mode = mode
    info.mtime = 1_700_000_000  # byte code is kept per content, not per build
    tar.addfile(info, io.BytesIO(content))
