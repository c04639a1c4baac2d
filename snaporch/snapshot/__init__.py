"""Snapshots of a domain or group: request, plan, run, bundle."""
