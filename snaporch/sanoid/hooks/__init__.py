"""sanoid's hooks."""
