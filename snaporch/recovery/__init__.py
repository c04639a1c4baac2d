"""Recovery of interrupted runs: the guardian, the decisions, and what carries them out."""
