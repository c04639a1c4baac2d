"""The contract with sanoid: what its hooks tell, and what is done about it."""
