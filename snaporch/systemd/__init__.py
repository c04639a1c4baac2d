"""systemd: detached processes, unit states, service notifications, scopes with a low priority."""
