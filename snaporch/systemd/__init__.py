"""What systemd is told, asked and given."""
