"""The process that holds a guest still for sanoid, and how hooks talk to it."""
