"""The process that holds a guest for sanoid, and the messages between it and the hooks."""
