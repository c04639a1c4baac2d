"""Finds problems that would make snapshots fail: gathers facts, applies rules, returns findings."""
