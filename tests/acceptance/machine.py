"""The stock host: a virtual machine with real pools, which can lose its power."""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

BOOT_SECONDS = {"tcg": 900, "kvm": 60}
"""A KVM that answers and then hangs is noticed after a minute."""
ACCELERATOR = {"tcg": "tcg,thread=multi,tb-size=1024", "kvm": "kvm"}
CPU = {"tcg": "Nehalem", "kvm": "host"}
# QEMU 7.2 emulates cmpxchg16b wrongly at times, and Linux uses it all the time. The QEMU in the
# machine uses it, too, rarely, and cannot do without.
COMMAND_LINE = (
    "root=/dev/vda rw console=ttyS0 net.ifnames=0 tsc=reliable clearcpuid=cx16 loglevel=4"
)
POOL_DISKS_GIB = (4, 4, 4)


class MachineError(Exception):
    """The machine did not do what is expected of any machine; the text has the reason."""


class Machine:
    """One virtual machine over a read-only image, with its files in ``work``.

    Between two starts its disks stay as they are. Each phase of a step is one command over ssh,
    the only way in: there is no network but that.
    """

    def __init__(self, image: Path, work: Path, accelerator: str, memory_mib: int) -> None:
        self.image = image
        self.work = work
        self.accelerator = accelerator
        self.memory_mib = memory_mib
        self.boots = 0
        self._qemu: subprocess.Popen[bytes] | None = None
        self._control = work / "ssh"
        base = str(image / "root.qcow2")
        if not Path(self._disk(0)).exists():
            self._create(0, "-F", "qcow2", "-b", base)
            for number, size in enumerate(POOL_DISKS_GIB, 1):
                self._create(number, size=f"{size}G")

    def _create(self, number: int, *options: str, size: str = "") -> None:
        words = ["qemu-img", "create", "-q", "-f", "qcow2", *options, self._disk(number)]
        subprocess.run([*words, *([size] if size else [])], check=True)

    def start(self) -> float:
        """Boot; the seconds until systemd has started everything, or has given up."""
        began = time.monotonic()
        self.boots += 1
        self._control.unlink(missing_ok=True)
        self._port = _free_port()
        log = (self.work / "qemu.log").open("ab")
        self._qemu = subprocess.Popen(
            ["nice", "-n", "5", *self._command()], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        end = began + BOOT_SECONDS[self.accelerator]
        while not self._logged_in():
            if self._qemu.poll() is not None:
                raise MachineError(f"QEMU ended with {self._qemu.returncode}: {log.name}")
            if time.monotonic() > end:
                raise MachineError(f"no login in time; its console: {self.work}/console.log")
            time.sleep(1)
        self.output("systemctl is-system-running --wait || true", timeout=600)
        return time.monotonic() - began

    def _logged_in(self) -> bool:
        """Open the connection that all commands use; it stays, in the background."""
        words = self._ssh()
        words[1:1] = ["-o", "ControlMaster=yes", "-fN"]
        quiet = subprocess.DEVNULL
        return not subprocess.run(
            words, stdin=quiet, stdout=quiet, stderr=quiet, check=False
        ).returncode

    def _disk(self, number: int) -> str:
        return str(self.work / f"disk{number}.qcow2")

    def _command(self) -> list[str]:
        words = [
            "qemu-system-x86_64",
            "-nodefaults",
            *("-machine", "q35", "-accel", ACCELERATOR[self.accelerator]),
            *("-cpu", CPU[self.accelerator], "-smp", "2", "-m", str(self.memory_mib)),
            *("-kernel", str(self.image / "vmlinuz"), "-initrd", str(self.image / "initrd.img")),
            *("-append", COMMAND_LINE, "-display", "none", "-device", "virtio-rng-pci"),
            *("-chardev", f"file,id=console,path={self.work}/console.log,append=on"),
            *("-serial", "chardev:console"),
            *("-netdev", f"user,id=n,restrict=on,hostfwd=tcp:127.0.0.1:{self._port}-:22"),
            *("-device", "virtio-net-pci,netdev=n,romfile="),
        ]
        for number in range(len(POOL_DISKS_GIB) + 1):
            words += ["-drive", f"file={self._disk(number)},if=virtio,format=qcow2,discard=unmap"]
        return words

    def _ssh(self, *command: str) -> list[str]:
        options = {
            "ConnectTimeout": "20",
            "ControlPath": str(self._control),
            "IdentityFile": str(self.image / "key"),
            "LogLevel": "ERROR",
            "ServerAliveInterval": "60",
            "StrictHostKeyChecking": "no",
            "UserKnownHostsFile": "/dev/null",
        }
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return ["ssh", *words, "-p", str(self._port), "root@127.0.0.1", *command]

    def output(self, command: str, timeout: float = 300, content: bytes | None = None) -> str:
        """The output of a command that must succeed; ``content`` is its standard input."""
        stdin = {"input": content} if content is not None else {"stdin": subprocess.DEVNULL}
        done = subprocess.run(
            self._ssh(command), capture_output=True, timeout=timeout, check=False, **stdin
        )
        if done.returncode:
            raise MachineError(f"{command}: {done.returncode}: {done.stderr.decode().strip()}")
        return done.stdout.decode()

    def send(self, source: Path, names: list[str], target: str) -> None:
        """Copy files and directories below ``source`` into the directory ``target``."""
        tar = ["tar", "-C", str(source), "--exclude=__pycache__", "-czf", "-", *names]
        content = subprocess.run(tar, check=True, capture_output=True).stdout
        self.output(f"mkdir -p {target} && tar -C {target} -xzf -", content=content)

    def lines(self, command: str, timeout: float) -> Iterator[str]:
        """Yield the lines that a command prints, as they come; it is ended after ``timeout``.

        Raises MachineError if it fails.
        """
        process = subprocess.Popen(
            ["timeout", str(timeout), *self._ssh(f"{command} 2>&1")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        try:
            yield from process.stdout
        except GeneratorExit:
            process.kill()
            process.wait()
            raise
        status = process.wait()
        if status:
            late = f" (longer than {timeout:.0f} s)" if status == 124 else ""
            raise MachineError(f"ended with {status}{late}")

    def cut_power(self) -> None:
        """Kill QEMU: what the machine had not written to its disks is lost."""
        if self._qemu is not None:
            self._qemu.kill()
            self._qemu.wait()
        self._qemu = None

    def wait_off(self, timeout: float) -> None:
        """Wait until the machine has switched itself off."""
        assert self._qemu is not None
        try:
            self._qemu.wait(timeout)
        except subprocess.TimeoutExpired:
            raise MachineError(f"not off after {timeout:.0f} s") from None
        self._qemu = None

    def versions(self) -> dict[str, str]:
        """What the report names."""
        return json.loads(self.output("python3 /opt/acceptance/tests/acceptance/versions.py"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tools_missing() -> list[str]:
    """The programs of the host without which there is no machine."""
    return [name for name in ("qemu-system-x86_64", "qemu-img", "ssh") if not shutil.which(name)]
