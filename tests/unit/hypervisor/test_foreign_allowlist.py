"""What a definition of another host has that an admin must accept; ordinary guests have nothing."""

import re
from xml.etree import ElementTree

import pytest
from fakes.domain_corpus import Grammar, examples
from fakes.domain_xml import DiskSpec, domain_xml

from snaporch.hypervisor.domain_xml import parse
from snaporch.hypervisor.foreign_allowlist import unlisted_of_another_host

UUID = "7f1c0d4e-4f7d-4a6e-9d0a-0d7c5a1b2c3d"
ORDINARY = f"""<domain type='kvm' id='3'>
  <name>web</name><uuid>{UUID}</uuid>
  <metadata><l:libosinfo xmlns:l='http://libosinfo.org/xmlns/libvirt/domain/1.0'>
    <l:os id='http://ubuntu.com/ubuntu/24.04'/></l:libosinfo></metadata>
  <memory unit='KiB'>4194304</memory><currentMemory unit='KiB'>4194304</currentMemory>
  <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>
  <vcpu placement='static' cpuset='0-3'>2</vcpu>
  <resource><partition>/machine</partition></resource>
  <sysinfo type='smbios'><system><entry name='serial'>ds=nocloud;s=http://a/b</entry></system>
  </sysinfo>
  <os firmware='efi'><type arch='x86_64' machine='pc-q35-10.0'>hvm</type>
    <firmware><feature enabled='yes' name='secure-boot'/></firmware>
    <loader readonly='yes' secure='yes' type='pflash'>/usr/share/OVMF/OVMF_CODE_4M.ms.fd</loader>
    <nvram template='/usr/share/OVMF/OVMF_VARS_4M.ms.fd' templateFormat='raw' format='raw'
    >/var/lib/libvirt/qemu/nvram/web_VARS.fd</nvram><boot dev='hd'/></os>
  <features><acpi/><apic/><hyperv mode='custom'><spinlocks state='on' retries='8191'/></hyperv>
    <smm state='on'/></features>
  <cpu mode='custom' match='exact' check='full'><model fallback='forbid'>Skylake-Client-IBRS</model>
    <vendor>Intel</vendor><feature policy='disable' name='x2apic'/></cpu>
  <clock offset='localtime'><timer name='hpet' present='no'/></clock>
  <on_poweroff>destroy</on_poweroff><on_reboot>restart</on_reboot><on_crash>destroy</on_crash>
  <pm><suspend-to-mem enabled='no'/></pm>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2' discard='unmap'/>
      <source file='/tank/web/a.qcow2' index='2'><seclabel model='dac' relabel='no'/></source>
      <backingStore type='file' index='3'><format type='raw'/><source file='/tank/web/b.raw'/>
        <backingStore/></backingStore>
      <target dev='vda' bus='virtio'/><alias name='virtio-disk0'/>
      <address type='pci' domain='0x0000' bus='0x04' slot='0x00' function='0x0'/></disk>
    <disk type='file' device='cdrom'><source file='/tank/web/debian.iso'/><target dev='sda'/>
      <readonly/></disk>
    <controller type='usb' index='0' model='qemu-xhci' ports='15'/>
    <filesystem type='mount' accessmode='passthrough'><driver type='virtiofs'/>
      <binary path='/usr/libexec/virtiofsd'/><source dir='/tank/web/share'/><target dir='mnt/x'/>
      </filesystem>
    <interface type='network'><mac address='52:54:00:00:00:01'/>
      <source network='default' portid='{UUID}' bridge='virbr0'/><target dev='vnet3'/>
      <model type='virtio'/><filterref filter='clean-traffic'/></interface>
    <interface type='bridge'><source bridge='br0'/><virtualport type='openvswitch'>
      <parameters interfaceid='{UUID}'/></virtualport><vlan><tag id='5'/></vlan></interface>
    <interface type='direct'><source dev='eth0' mode='bridge'/></interface>
    <serial type='file'><source path='/tank/web/serial.log' append='on'/></serial>
    <serial type='pty'><source path='/dev/pts/3'/><target type='isa-serial' port='0'>
      <model name='isa-serial'/></target></serial>
    <console type='pty' tty='/dev/pts/3'><source path='/dev/pts/3'/>
      <target type='serial' port='0'/></console>
    <channel type='unix'>
      <source mode='bind' path='/run/libvirt/qemu/channel/3-web/org.qemu.guest_agent.0'/>
      <target type='virtio' name='org.qemu.guest_agent.0' state='connected'/></channel>
    <channel type='spicevmc'><target type='virtio' name='com.redhat.spice.0'/></channel>
    <input type='tablet' bus='usb'/><input type='keyboard' bus='ps2'/>
    <tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>
    <graphics type='spice' port='5900' autoport='yes' listen='127.0.0.1'>
      <listen type='address' address='127.0.0.1'/><image compression='off'/></graphics>
    <graphics type='vnc' port='-1' autoport='yes'/>
    <sound model='ich9'/><audio id='1' type='spice'/>
    <video><model type='virtio' heads='1' primary='yes'><acceleration accel3d='no'/></model></video>
    <redirdev bus='usb' type='spicevmc'/>
    <watchdog model='itco' action='reset'/>
    <memballoon model='virtio'/><vsock model='virtio'><cid auto='no' address='3'/></vsock>
    <rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>
  </devices>
  <seclabel type='dynamic' model='dac' relabel='yes'><label>+64055:+64055</label></seclabel>
</domain>"""


def is_own(path):
    return path.startswith("/tank/web/")


def found(xml):
    return {each.word for each in unlisted_of_another_host(parse(xml), is_own)}


def test_a_guest_of_virt_manager_has_nothing_to_accept():
    assert found(ORDINARY) == set()


def on(devices):
    return f"<domain><name>web</name><uuid>{UUID}</uuid><devices>{devices}</devices></domain>"


SERVED = "<source protocol='rbd' name='pool/web'><host name='mon1' port='6789'/></source>"
GPU = "<source><address domain='0x0000' bus='0x03' slot='0x00' function='0x0'/></source>"
TO_A_PORT = "<target type='guestfwd' address='10.0.2.1' port='1' name='agent.0'/>"
AGENT = "<target type='virtio' name='agent.0'/>"
VICTIM = "/var/lib/libvirt/qemu/nvram/victim_VARS.fd"
OF_OTHERS = "/run/libvirt/qemu/channel/3-victim/agent.0"
OF_A_NAMESAKE = "/run/libvirt/qemu/channel/3-web2/agent.0"
OWN = "/run/libvirt/qemu/channel/3-web/agent.0"


@pytest.mark.parametrize(
    ("xml", "expected"),
    [
        (
            on("<interface type='ethernet'><target dev='macvtap0' managed='no'/></interface>"),
            "interface.target.managed=no",
        ),
        (
            on("<interface type='ethernet'><script path='up'/></interface>"),
            "interface.script.path=up",
        ),
        (
            on("<interface type='ethernet'><downscript path='/x'/></interface>"),
            "interface.downscript.path=/x",
        ),
        (
            on("<interface><script path='/tank/web/up'/></interface>"),
            "interface.script.path=/tank/web/up",
        ),
        (on("<interface><backend tap='x'/></interface>"), "interface.backend.tap=x"),
        (
            on("<interface type='direct'><portForward proto='tcp'/></interface>"),
            "interface.portForward",
        ),
        (on("<interface type='user'><backend type='passt'/></interface>"), "interface.type=user"),
        (
            on("<interface type='direct'><source dev='eth0' mode='passthrough'/></interface>"),
            "interface.source.mode=passthrough",
        ),
        (
            on("<interface type='direct' trustGuestRxFilters='yes'/>"),
            "interface.trustGuestRxFilters=yes",
        ),
        (
            on("<interface type='hostdev'><source><address/></source></interface>"),
            "interface.type=hostdev",
        ),
        (on("<emulator>/tank/web/qemu-kvm</emulator>"), "emulator=/tank/web/qemu-kvm"),
        (on("<emulator>/usr/bin/../../x/kvm</emulator>"), "emulator=/usr/bin/../../x/kvm"),
        (
            on("<filesystem><binary path='/tank/run'/></filesystem>"),
            "filesystem.binary.path=/tank/run",
        ),
        (on("<filesystem type='mount'><source dir='/etc'/></filesystem>"), "/etc"),
        (on("<serial><log file='/etc/cron.d/x' append='on'/></serial>"), "/etc/cron.d/x"),
        (on("<serial type='file'><source path='/etc/x'/></serial>"), "/etc/x"),
        (on("<serial type='file'><source path='/dev/pts/3'/></serial>"), "/dev/pts/3"),
        (on("<serial type='unix'><source mode='connect' path='/run/x'/></serial>"), "/run/x"),
        (on(f"<serial type='unix'><source path='{OF_OTHERS}'/>{AGENT}</serial>"), OF_OTHERS),
        (
            on(f"<channel type='unix'><source path='{OF_OTHERS}.x'/>{AGENT}</channel>"),
            f"{OF_OTHERS}.x",
        ),
        (on(f"<channel type='unix'><source path='{OF_OTHERS}'/>{TO_A_PORT}</channel>"), OF_OTHERS),
        (on(f"<channel type='unix'><source path='{OF_OTHERS}'/>{AGENT}</channel>"), OF_OTHERS),
        (
            on(f"<channel type='unix'><source path='{OF_A_NAMESAKE}'/>{AGENT}</channel>"),
            OF_A_NAMESAKE,
        ),
        (
            on(f"<channel type='unix'><source mode='connect' path='{OWN}'/>{AGENT}</channel>"),
            OWN,
        ),
        (on("<serial type='tcp'><source mode='bind' service='1'/></serial>"), "serial.type=tcp"),
        (on("<console type='pty' tty='/dev/sda'/>"), "/dev/sda"),
        (on("<graphics type='vnc' listen='0.0.0.0'/>"), "graphics.listen=0.0.0.0"),
        (
            on("<graphics type='vnc' listen='::'><listen type='address' address='::'/></graphics>"),
            "graphics.listen.address=::",
        ),
        (
            on("<graphics type='vnc'><listen type='network' network='lan'/></graphics>"),
            "graphics.listen.type=network",
        ),
        (on("<graphics type='egl-headless'/>"), "graphics.type=egl-headless"),
        (on("<graphics type='spice'><gl enable='yes'/></graphics>"), "graphics.gl.enable=yes"),
        (
            on("<video><model><acceleration accel3d='yes'/></model></video>"),
            "video.model.acceleration.accel3d=yes",
        ),
        (on("<disk><source file='etc/shadow'/></disk>"), "disk.source.file=etc/shadow"),
        (on("<disk><source dev='/dev/../x'/></disk>"), "/dev/../x"),
        (on("<disk><source file='/tank/web/../victim/a'/></disk>"), "/tank/web/../victim/a"),
        (
            on("<disk device='cdrom'><source file='/var/lib/libvirt/images/seed.iso'/></disk>"),
            "/var/lib/libvirt/images/seed.iso",
        ),
        (
            on("<disk><backingStore type='file'><source file='/srv/b'/></backingStore></disk>"),
            "/srv/b",
        ),
        (on("<disk type='vhostuser'/>"), "disk.type=vhostuser"),
        (on(f"<disk type='network'>{SERVED}</disk>"), "disk.type=network"),
        (on("<disk type='volume'><source pool='default' volume='a'/></disk>"), "disk.type=volume"),
        (on("<disk rawio='yes'/>"), "disk.rawio=yes"),
        (on(f"<hostdev mode='subsystem' type='pci'>{GPU}</hostdev>"), "hostdev"),
        (on("<shmem name='other'><size unit='M'>4</size></shmem>"), "shmem"),
        (
            on("<tpm><backend type='passthrough'><device/></backend></tpm>"),
            "tpm.backend.type=passthrough",
        ),
        (on("<input type='evdev'/>"), "input.type=evdev"),
        (on("<rng><backend model='random'>/dev/sda</backend></rng>"), "/dev/sda"),
        (on("<audio id='1' type='none' path='/x'/>"), "/x"),
        (on("<audio id='1' type='none' path='x.wav'/>"), "audio.path=x.wav"),
        (
            on("<controller type='usb'><rom file='x.rom'/></controller>"),
            "controller.rom.file=x.rom",
        ),
        (on("<lease/>"), "lease"),
        (on("<watchdog model='itco' action='dump'/>"), "watchdog.action=dump"),
        (on("<new/>"), "new"),
        ("<domain><os><kernel>/boot/vmlinuz</kernel></os></domain>", "/boot/vmlinuz"),
        ("<domain><os><initrd>etc/shadow</initrd></os></domain>", "initrd=etc/shadow"),
        ("<domain><os><nvram>x</nvram></os></domain>", "nvram=x"),
        (
            f"<domain><name>web</name><os><nvram>{VICTIM}</nvram></os></domain>",
            VICTIM,
        ),
        ("<domain><os><nvram>/tank/web/x<source/>/../y</nvram></os></domain>", "/tank/web/x/../y"),
        ("<domain><os><nvram template='/etc/x'/></os></domain>", "/etc/x"),
        ("<domain><os><loader>/tank/web/x.fd</loader></os></domain>", "/tank/web/x.fd"),
        (
            "<domain><os><loader readonly='no' type='pflash'/></os></domain>",
            "loader.readonly=no",
        ),
        (
            "<domain><os><loader type='pflash'>/usr/share/OVMF/x</loader></os></domain>",
            "loader.readonly=",
        ),
        ("<domain><os><smbios mode='host'/></os></domain>", "smbios.mode=host"),
        ("<domain><cputune><vcpusched vcpus='0'/></cputune></domain>", "cputune.vcpusched"),
        ("<domain><cputune><emulatorsched/></cputune></domain>", "cputune.emulatorsched"),
        ("<domain><memoryBacking><locked/></memoryBacking></domain>", "memoryBacking.locked"),
        (
            "<domain><memoryBacking><source type='file'/></memoryBacking></domain>",
            "memoryBacking.source.type=file",
        ),
        ("<domain><perf><event name='cmt' enabled='yes'/></perf></domain>", "perf"),
        ("<domain><seclabel x='y'/></domain>", "seclabel.x=y"),
        ("<domain><bootloader>sh</bootloader></domain>", "bootloader"),
        ("<domain><sysinfo type='fwcfg'><entry file='/x'/></sysinfo></domain>", "/x"),
        ("<domain><on_crash>coredump-restart</on_crash></domain>", "on_crash=coredump-restart"),
        ("<domain><x:y xmlns:x='urn:x'/></domain>", None),
    ],
)
def test_what_no_ordinary_guest_has(xml, expected):
    assert found(xml) == {expected} - {None}


def test_what_is_in_an_element_that_is_refused_is_shown_and_its_paths_are_refused_besides():
    xml = on(f"<disk type='vhostuser'><source path='/run/x'/>{'<y/>' * 99}</disk>")
    refused = {each.word: each.shown for each in unlisted_of_another_host(parse(xml), is_own)}
    assert refused.keys() == {"disk.type=vhostuser", "/run/x"}
    assert refused["disk.type=vhostuser"].startswith(
        "<disk type='vhostuser'><source path='/run/x'>"
    )
    assert len(refused["disk.type=vhostuser"]) < 200


NO_PATHS = re.compile(
    r"<(metadata|{.*|any|name|title|description|cmdline|partition|serial|vendor|product|wwn|entry|"
    r"arg|auth|secret|label|baselabel|imagelabel|seclabel|parameter|target|timer|clock|adapter|"
    r"cipher|ivgen|cookie|dhCert|session|fibrechannel|iqn|interface|graphics passwd|host name|"
    r"source (fdgroup|name|query|tlsHostname))( |$)"
)
"""What the guest reads, and names in a network or of libvirt."""


def test_a_relative_path_is_found_wherever_libvirt_has_one():
    plain = ElementTree.fromstring(domain_xml("web", UUID, [DiskSpec("vda", "/tank/a.img")]))
    missed = set()
    for example in examples(plain, Grammar()):
        for element in example.root.iter():
            for name, value in element.attrib.items():
                if value.startswith("/q7q"):
                    element.set(name, f"REL{value}")
            if (element.text or "").startswith("/q7q"):
                element.text = f"REL{element.text}"
        words = {each.word for each in unlisted_of_another_host(example.root, is_own)}
        whole = {re.split(r"\.type=", each)[0].rpartition(".")[2] for each in words}
        refused = {e for tag in whole for top in example.root.iter(tag) for e in top.iter()}
        for element in set(example.root.iter()) - refused:
            for name, value in (("", element.text or ""), *element.attrib.items()):
                if value.startswith("REL") and not any(each.endswith(value) for each in words):
                    missed.add(f"<{element.tag} {name}")
    assert {each for each in missed if not NO_PATHS.match(each)} == set()


def test_the_socket_of_a_channel_has_the_beginning_of_a_long_name():
    name = "a-name-of-more-than-twenty-letters"
    for short in (name[:20], name[:19], "a-name-of-more-than-xy"):
        path = f"/run/libvirt/qemu/channel/3-{short}/agent.0"
        xml = on(f"<channel type='unix'><source mode='bind' path='{path}'/>{AGENT}</channel>")
        assert found(xml.replace("web", name)) == ({path} if short != name[:20] else set())
