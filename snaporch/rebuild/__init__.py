"""Bring guests back from a replica, onto a host that has lost them or never had them."""
