"""A libvirtd of the benchmark's own, which disturbs no other.

libvirtd knows its directories from when it was built. So the benchmark runs in a mount namespace of
its own, where those directories are others; libvirtd, virsh and snaporch see nothing else.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PACKAGES = {
    "libvirtd": "libvirt-daemon",
    "virsh": "libvirt-clients",
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "virtnbdbackup": "virtnbdbackup",
    "pigz": "pigz",
    "lz4": "lz4",
    "zstd": "zstd",
    "unshare": "util-linux",
}
_OWN = {
    "/etc/libvirt": "etc",
    "/var/lib/libvirt": "lib",
    "/run/libvirt": "run",
    "/var/cache/libvirt": "cache",
    "/var/log/libvirt": "log",
}
_USER = ("libvirt-qemu:x:64055:64055::/var/lib/libvirt:/usr/sbin/nologin", "libvirt-qemu:x:64055:")
_QEMU_CONF = """\
user = "root"
group = "root"
security_driver = "none"
cgroup_controllers = []
namespaces = []
stdio_handler = "file"
"""
_LIBVIRTD_CONF = 'auth_unix_rw = "none"\nunix_sock_group = "root"\n'
_INSIDE = "SNAPORCH_BENCH_INSIDE"
_PATIENCE_SECONDS = 60
_PIPE_LIMIT = Path("/proc/sys/fs/pipe-max-size")
ROOM = 128 << 20


def ensure_packages() -> None:
    """Install missing packages from the host's own Debian, without starting their services."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = sorted({p for tool, p in PACKAGES.items() if shutil.which(tool, path=path) is None})
    if not missing:
        return
    print(f"bench: installing on this host: {' '.join(missing)}", file=sys.stderr)
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=600"]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "install", "-y", "--no-install-recommends", *missing], check=True)


def enter_namespace() -> None:
    """Run this program again, in a mount namespace of its own."""
    if os.environ.get(_INSIDE):
        return
    if os.geteuid() != 0:
        sys.exit("bench: has to run as root, for a libvirtd in a mount namespace of its own")
    os.environ[_INSIDE] = "1"
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv]
    os.execvp(command[0], command)


@contextlib.contextmanager
def own_libvirtd(root: Path) -> Iterator[int]:
    """libvirtd over directories below ``root``; its process id. Stopped at the end."""
    for place, name in _OWN.items():
        (root / name).mkdir(parents=True)
        Path(place).mkdir(parents=True, exist_ok=True)
        _bind(root / name, place)
    for name, line in zip(("passwd", "group"), _USER, strict=True):
        lines = Path(f"/etc/{name}").read_text().splitlines()
        if not any(each.startswith("libvirt-qemu:") for each in lines):
            lines.append(line)
        (root / name).write_text("\n".join(lines) + "\n")
        _bind(root / name, f"/etc/{name}")
    (root / "etc/qemu.conf").write_text(_QEMU_CONF)
    (root / "etc/libvirtd.conf").write_text(_LIBVIRTD_CONF)
    with (root / "libvirtd.log").open("w") as log:
        daemon = subprocess.Popen(["libvirtd"], stdout=log, stderr=log)
    try:
        _wait_for(daemon, root / "libvirtd.log")
        yield daemon.pid
    finally:
        daemon.terminate()
        daemon.wait()


def _bind(source: Path, target: str) -> None:
    subprocess.run(["mount", "--bind", source, target], check=True)


def _wait_for(daemon: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < end and daemon.poll() is None:
        if subprocess.run(["virsh", "-q", "uri"], capture_output=True, check=False).returncode == 0:
            return
        time.sleep(0.1)
    sys.exit(f"bench: libvirtd does not answer:\n{log.read_text()[-2000:]}")


def prefer(pid: int, nice: int) -> None:
    """Give a process, and its session where the kernel groups those, a priority (sched(7))."""
    if not nice:
        return
    os.setpriority(os.PRIO_PROCESS, pid, nice)
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(f"{nice}\n")


@contextlib.contextmanager
def room_for_pipes() -> Iterator[None]:
    """Let snaporch have what root of an ordinary host has, if this one keeps it from root.

    A pipe as long as the rest of a guest's RAM needs CAP_SYS_RESOURCE, or a higher limit (pipe(7)).
    """
    before = _PIPE_LIMIT.read_text()
    ours, other = os.pipe()
    try:
        fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, ROOM)
    except PermissionError:
        print(f"bench: no CAP_SYS_RESOURCE here: {_PIPE_LIMIT} raised meanwhile", file=sys.stderr)
        _PIPE_LIMIT.write_text(str(ROOM))
    finally:
        os.close(ours)
        os.close(other)
    try:
        yield
    finally:
        _PIPE_LIMIT.write_text(before)


def versions() -> dict[str, str]:
    """Versions of the measured programs and of the host."""
    commands = {
        "libvirtd": ["libvirtd", "--version"],
        "qemu": ["qemu-system-x86_64", "--version"],
        "zstd": ["zstd", "--version"],
        "kernel": ["uname", "-r"],
    }
    found = {}
    for name, command in commands.items():
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        words = done.stdout.splitlines()[0].split()
        numbers = (word.strip("v,") for word in words)
        found[name] = next((word for word in numbers if word[:1].isdigit()), "unknown")
    found["cores"] = str(os.cpu_count())
    return found
