"""Settings of systemd units: after which they start, how long they may take to stop, weights.

They are used for the installed units (:mod:`snaporch.install_files`, ``templates/``) and for those
that a run starts (:mod:`snaporch.systemd.start_detached`).
"""

AFTER_LIBVIRT = (
    "zfs.target", "libvirtd.service", "libvirtd.socket", "virtqemud.service", "virtqemud.socket",
)  # fmt: skip
"""The units without which no guest can be released; systemd stops those of snaporch before them."""
AFTER = (*AFTER_LIBVIRT, "libvirt-guests.service")
"""At shutdown libvirt-guests saves or shuts off guests, which must be on their bases by then."""
STOP_TIME = "10min"
"""How long a run may take to release its guest after SIGTERM. systemd allows 30 minutes for the
whole shutdown, of which libvirt-guests needs the rest."""
LOW_WEIGHT = 20
"""``CPUWeight`` and ``IOWeight`` of bulk work: replications, verifications, sealing."""
