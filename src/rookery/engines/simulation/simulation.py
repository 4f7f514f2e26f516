"""The default engine: it chooses how a job is computed in this process."""

from dataclasses import dataclass, replace
from typing import Any

from rookery.engines import engine
from rookery.engines.engine import Job
from rookery.engines.simulation import debug, device
from rookery.engines.streaming import staged


@dataclass(frozen=True)
class Simulation(device.Settings):
    """The default engine: everything in this process, vectorised and compiled.

    Arguments:
        block: clients computed side by side; a larger cohort goes in blocks of this size, to bound memory. "auto": as
            many as there is room for, by an estimate made before anything is compiled; on a CPU at most 128, and one
            where local steps multiply large matrices.
        mesh: devices to divide the clients and their memory among: "all" (every device of every process), a number of
            devices, or a `jax.sharding.Mesh`. Each computes the members of a cohort that it holds, and the numbers are
            those of one device, to rounding. None: one device.
        debug: run one client at a time, not compiled, and name the client and the step where the first value that is
            not finite appears.
        convolutions: "products" computes them, and pooling, as slices and matrix products; "xla" as XLA does; "auto" as
            products on CPUs and GPUs, where XLA's are slow in loops and with each client's own kernel.
        precision: of the clients' losses. "bfloat16" computes them so, with x, y and all that is added up in their own
            type; "float32" multiplies float32 matrices in full, which GPUs otherwise round to 10 bits (TF32).
        remat: keep only the results of a loss's matrix products for its derivatives, and compute the rest again: less
            memory, more arithmetic.
    """

    def open(self, job: Job) -> Any:
        """A session for this job."""
        job = replace(job, computing=self.computing)
        if not job.clients.held:
            raise ValueError(
                "rk.Clients.like holds no data, sites do: give engine=rk.Federation(address, ...), or data."
            )
        if job.clients.placement == "host":
            return staged.opened(job, self)
        if self.debug:
            return debug.Session(engine.traced(job, True, self.convolutions), self)
        if self.mesh is not None:
            from rookery.engines.simulation import mesh  # JAX's tools for several processes take a while to import

            return mesh.Session(job, self)
        return device.Session(engine.traced(job, False, self.convolutions), self)
