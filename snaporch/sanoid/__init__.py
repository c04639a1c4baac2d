"""Cooperation with sanoid: its configuration, its hooks, and the process that holds a guest."""
