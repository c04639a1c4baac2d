"""What sanoid's hooks do."""
