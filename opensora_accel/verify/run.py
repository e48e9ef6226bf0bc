"""What a training step is told about the run that it is part of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from opensora_accel.plan import Plan
from opensora_accel.verify.shapes import MeshShape

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


Step = Callable[..., Any]
"""`step(model, run)`, or `step(run)` where it builds its model itself."""
ModelFn = Callable[[], "nn.Module"]


@dataclass(frozen=True)
class Run:
    """One call of the step: on a rank of a mesh, or on the single device that the mesh is held against."""

    shape: MeshShape
    """Axes and degrees; every degree is 1 on the single device."""
    rank: int
    data_rank: int
    """Which samples the step takes, and what its noise depends on: nothing else may."""
    data_size: int
    """How many data ranks there are, to choose samples by and for nothing else: on a single device they take their
    turns, so a loss divided by it would be wrong alike."""
    is_reference: bool = False
    """The plain run on one device: apply no parallelism."""
    watch: Callable[[nn.Module], None] = field(default=lambda model: None, repr=False)
    """Tells the verifier whose gradients to compare, in a step that builds its model itself (no `model_fn`)."""

    @property
    def plan(self) -> Plan:
        """The Plan to apply; on the single device it has every degree 1 and nothing else."""
        if self.shape.plan is None:
            raise ValueError("this mesh was given as axes, not as a Plan; use run.mesh, or verify with Plans")
        return self.shape.plan

    @property
    def world_size(self) -> int:
        return self.shape.world_size

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The mesh on CPU, with the axes' names: what FSDP2, diffusers and DTensor take."""
        from torch.distributed.device_mesh import init_device_mesh

        sizes: Any = tuple(degree for _, degree in self.shape.degrees)
        return init_device_mesh("cpu", sizes, mesh_dim_names=self.shape.axes)
