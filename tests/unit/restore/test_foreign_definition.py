"""What a definition that came from another host may have only if the admin accepts it."""

import pytest

from snaporch.errors import RefusedError
from snaporch.restore.foreign_definition import check_foreign_definitions


def definition(devices="", os=""):
    return f"<domain><name>web</name><os>{os}</os><devices>{devices}</devices></domain>"


def interface(element):
    return f"<interface type='ethernet'>{element}<target dev='tank'/></interface>"


@pytest.mark.parametrize(
    ("xml", "name"),
    [
        (definition(interface("<script path='python3'/>")), "script"),
        (definition(interface("<script path='/etc/qemu-ifup'/>")), "script"),
        (definition(interface("<downscript path='/bin/sh'/>")), "downscript"),
        (definition("<console type='pty'><log file='/etc/cron.d/x'/></console>"), "log"),
        (definition("<audio id='1' type='file' path='etc/x'/>"), "audio"),
        (definition("<controller type='usb'><rom file='x.rom'/></controller>"), "rom"),
        (definition("<emulator>qemu</emulator>"), "emulator"),
        (definition(os="<kernel>etc/shadow</kernel>"), "kernel"),
        (definition(os="<initrd>etc/shadow</initrd>"), "initrd"),
    ],
)
def test_what_root_runs_or_writes_and_relative_paths_are_refused(xml, name):
    with pytest.raises(RefusedError, match=f"has <{name}>; read it first; .*--accept {name}$"):
        check_foreign_definitions("web@s1", [definition(), xml], ())
    check_foreign_definitions("web@s1", [definition(), xml], [name])


def test_a_definition_as_virt_install_writes_it_passes():
    xml = definition(
        "<emulator>/usr/bin/qemu-system-x86_64</emulator>"
        "<disk type='file'><source file='/tank/web/web.raw'/><target dev='vda'/></disk>"
        "<interface type='network'><source network='default'/><model type='virtio'/></interface>"
        "<serial type='pty'><source path='/dev/pts/3'/><target type='isa-serial'/></serial>"
        "<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>"
        "<graphics type='vnc' port='-1'/><rng model='virtio'><backend model='random'>/dev/urandom"
        "</backend></rng>",
        "<type machine='q35'>hvm</type><loader>/usr/share/OVMF/OVMF_CODE.fd</loader>",
    )
    check_foreign_definitions("web@s1", [xml], ())
