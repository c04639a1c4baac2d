"""What would make snapshots fail: facts, rules, findings."""
