"""RAM, NVRAM, TPM state and XML of one snapshot: writing, describing, keeping, verifying."""
