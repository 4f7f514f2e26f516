"""The default engine, which chooses how a job is computed in this process."""

from dataclasses import dataclass, replace
from typing import Any

from rookery.engines import engine
from rookery.engines.engine import Job
from rookery.engines.simulation import asynchronous, debug, device
from rookery.engines.streaming import remembered, staged


@dataclass(frozen=True)
class Simulation(device.Settings):
    """The default engine: everything in this process, vectorised and compiled.

    Arguments:
        block: clients computed side by side. Larger cohorts are computed in blocks of this size, which bounds memory.
            "auto": as many as fit, by an estimate made before anything is compiled; on a CPU at most 128, or one if
            local steps multiply large matrices.
        mesh: devices to divide the clients and their memory among: "all" (every device of every process), a number of
            devices, or a `jax.sharding.Mesh`. All hold the same number of clients and about the same number of samples,
            and each computes the members of a cohort that it holds; the results equal those of one device up to
            rounding. None: one device.
        debug: run one client at a time, without compilation, and name the client and the step where the first value
            that is not finite appears.
        convolutions: how convolutions and pooling are computed. "products": as slices and matrix products; "xla": as
            XLA does; "auto": as products on CPUs and GPUs, where XLA is slow in loops and with a kernel per client.
        precision: the precision of the clients' losses. "bfloat16" computes losses in that type, and x, y and all sums
            keep their own type; "float32" multiplies float32 matrices in full precision, where GPUs round to 10 bits
            (TF32).
        remat: keep only the results of a loss's matrix products for its derivatives, and recompute the rest: less
            memory, more arithmetic.
        memory: where what clients remember is kept. "device"; "host": the rows of the cohorts of several rounds travel
            to the device and back together; "auto": on the host if it does not fit an accelerator beside the data.
        device_bytes: for clients with placement "host" or "pinned", the bytes of the device that their rows may take.
            None: half of what is free. If the rows of a cohort do not fit, they are read block by block.
    """

    def open(self, job: Job) -> Any:
        """Open a session for this job."""
        job = replace(job, computing=self.computing)
        if not job.clients.held:
            raise ValueError(
                "clients must hold data for a simulation; got the clients of rk.Clients.like. Give "
                "engine=rk.Federation(address, ...), or clients with data."
            )
        if self.debug and job.clock is not None:
            raise ValueError("clock must be None with debug=True; got rk.Clock(...). Leave out one of the two.")
        if job.asynchronous is not None:
            self._check_asynchronous(job)
            return asynchronous.Session(engine.traced(job, False, self.convolutions), self)
        if job.clients.placement != "device":
            if self.memory == "host":
                raise ValueError(
                    f'Simulation: memory must be "device" for clients with placement="{job.clients.placement}"; got '
                    '"host". Leave out one of the two.'
                )
            return staged.opened(job, self)
        if self.debug:
            return debug.Session(engine.traced(job, True, self.convolutions), self)
        if self.mesh is not None:
            from rookery.engines.simulation import mesh  # its imports of JAX's multi-process tools take a while

            return mesh.Session(job, self)
        traced = engine.traced(job, False, self.convolutions)
        session = remembered.Session if remembered.chosen(traced, self) else device.Session
        return session(traced, self)

    def _check_asynchronous(self, job: Job) -> None:
        if job.clock is None:
            raise ValueError(
                "asynchronous: a simulation needs the speeds of clients; got clock=None. Give clock=rk.Clock(...)."
            )
        if self.mesh is not None:
            raise ValueError(f"Simulation: mesh must be left out of an asynchronous run; got {self.mesh!r}.")
        if self.memory == "host":
            raise ValueError('Simulation: memory must be "device" in an asynchronous run; got "host". Leave it out.')
        if job.clients.placement != "device":
            raise ValueError(
                "clients must have their rows on the device in an asynchronous run; got rows on the host. Leave out "
                "`asynchronous`, or the placement."
            )
