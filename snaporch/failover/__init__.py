"""Planned moves of a guest to the host of its replica, and fences of guests."""
