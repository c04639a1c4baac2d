"""Commands of the benchmarks in the lab."""

import subprocess
import sys


def run(*words: str) -> str:
    """What a command prints; if it fails, the benchmark ends with that."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stdout}{done.stderr}")
    return done.stdout
