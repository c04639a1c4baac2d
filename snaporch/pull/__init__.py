"""Copy guests from hosts that must not reach this machine."""
