"""Guests for tests, which show whether their RAM and disks are of one instant.

    from guests.disks import Disk
    from guests.guest import Guest

    guest = Guest.create("vm", [Disk("file", "tank/vm"), Disk("zvol", "flash/vm")])

What is in them: probes/README.md. They are built on the host by ``build``.
"""
