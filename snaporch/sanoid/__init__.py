"""The contract with sanoid: its configuration, what its hooks tell, and what is done about it."""
