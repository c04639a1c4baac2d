"""Print, as JSON, what the stock host consists of. Runs in it."""

import json
import os
import subprocess
from pathlib import Path


def main():
    print(json.dumps({
        "Debian": Path("/etc/debian_version").read_text().strip(),
        "Linux": os.uname().release,
        "OpenZFS": Path("/sys/module/zfs/version").read_text().strip(),
        "libvirt": package("libvirt-daemon"),
        "QEMU": package("qemu-system-x86"),
        "sanoid": package("sanoid"),
        "AppArmor": f"{package('apparmor')}, {profiles()} profiles enforced",
    }))  # fmt: skip


def package(name):
    return output("dpkg-query", "-W", "-f", "${Version}", name)


def profiles():
    loaded = Path("/sys/kernel/security/apparmor/profiles").read_text().splitlines()
    return sum(line.endswith("(enforce)") for line in loaded)


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
