"""Bundles: the RAM, UEFI variables, TPM state, XML and manifest that belong to one snapshot."""
