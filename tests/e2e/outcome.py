"""The result of a command."""

import json
from dataclasses import dataclass
from typing import Any


@dataclass
class Outcome:
    """Exit status and output of a command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, which must be one JSON document and nothing else."""
        return json.loads(self.out)
