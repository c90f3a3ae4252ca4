"""The machines of a simulation."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.model import UNLIMITED, NodeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The simulated machines: `nodes` equal nodes, each with cores, memory in MB and GPUs."""

    nodes: int = 1
    cores: int = 1
    memory_mb: int = UNLIMITED
    gpus: int = 0
    gpu_memory_mb: int = 80_000
    labels: tuple[str, ...] = ()

    def specs(self) -> list[NodeSpec]:
        """Return the nodes by name, in order."""
        return [
            NodeSpec(
                name=f"n{number}",
                pools=("cpu", "gpu", "api") if self.gpus else ("cpu", "api"),
                cores=self.cores,
                memory_mb=self.memory_mb,
                cells=self.gpus,
                cell_memory_mb=self.gpu_memory_mb,
                labels=frozenset(self.labels),
                grants_memory=True,
            )
            for number in range(self.nodes)
        ]
