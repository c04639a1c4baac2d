"""systemd: unit files, unit states, service notifications, scopes with a low priority."""
