"""How it stands: what was taken, what comes, what is left over, and what of it needs attention."""
