"""What machines cost: a TOML file with a price for each hour of a core, of a GPU and of a GB of memory, in any currency.

```toml
core_hour = 0.034
gpu_hour = 2.10
gb_hour = 0.0045
```

What is not named costs nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.replay.trace_lines import TraceError, first_problem, read_toml

Price = Annotated[float, Field(ge=0, le=1e9)]
MB_PER_GB = 1024


class Prices(BaseModel):
    """Prices per hour."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)

    core_hour: Price = 0.0
    gpu_hour: Price = 0.0
    gb_hour: Price = 0.0

    def hourly(self, cores: int, gpus: int, memory_mb: int) -> float:
        """Return what machines cost an hour."""
        return cores * self.core_hour + gpus * self.gpu_hour + memory_mb / MB_PER_GB * self.gb_hour


def read_prices(path: Path) -> Prices:
    """Read a file of prices. Raises `TraceError`, which names file and key."""
    try:
        found = Prices.model_validate(read_toml(path))
    except ValidationError as error:
        raise first_problem(error).at(str(path)) from None
    if not (found.core_hour or found.gpu_hour or found.gb_hour):
        raise TraceError("no price in it: name core_hour, gpu_hour or gb_hour", file=str(path))
    return found
