"""A run over a federation, and the checkpoints of what its sites remember."""

import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rookery.base.printable import printable
from rookery.base.processes import ONE_PROCESS
from rookery.engines import engine
from rookery.engines.engine import Stopped
from rookery.engines.federation.coordinator import Coordinator
from rookery.engines.federation.site import Site
from rookery.engines.folders import Folder
from rookery.language.channel import is_private
from rookery.language.ledger import Amounts
from rookery.plan import trace as plan


class Session:
    """A run with sites in this process, or on a network."""

    processes = ONE_PROCESS
    memory = None  # it stays with the sites
    notes = ()

    def __init__(self, traced: engine.Traced, coordinator: Coordinator, sites: list[Site] | None = None) -> None:
        self._traced, self._job, self.coordinator, self.sites = traced, traced.job, coordinator, sites or []
        self.durable = sites is None  # on a network
        self.clients = traced.job.clients
        self.begun = False
        self.store = coordinator.run  # the name under which sites keep what they remember
        self.rounds = 0
        self.stopped: Stopped | None = None
        self.warned: Stopped | None = None
        self._carry: Any = None
        remembered = self._traced.start.made.carry
        self.remembers = bool(jax.tree.leaves((remembered.memory, remembered.client)))
        self.keepers = Keepers(self) if self.remembers else None
        # The number of rounds after which each site last wrote what it remembers; -1: never.
        self.wrote = np.full(self._job.clients.n, -1, np.int32)

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the program and its constants."""
        return self._traced.fingerprint

    @property
    def shows_each(self) -> bool:
        """See `engine.Session`: over a network, whether every site's policy allows it."""
        opened = self.coordinator.links.opened.values()
        return not self.durable or all(said.get("evaluation") == "own" for said in opened)

    @property
    def channel(self) -> Any:
        """See `engine.Session`."""
        return self._job.channel

    @property
    def account(self) -> Any:
        """See `engine.Session`."""
        return self._traced.account

    @property
    def state(self) -> Any:
        """The algorithm's state."""
        return self._carry.state

    def init(self) -> Amounts:
        """See `engine.Session.init`."""
        made, amounts = self.coordinator.start()
        self._carry, self.begun = made.carry, True
        self._have_written()
        self._check(made.carry, -1)
        return amounts

    def advance(self, rounds: int) -> list[Amounts]:
        """See `engine.Session.advance`."""
        done: list[Amounts] = []
        minimum = self._job.minimum
        for _ in range(rounds):
            carry = self._carry
            made, amounts = self.coordinator.round(self.rounds, carry.state, carry.server, carry.noise)
            if made.least is not None and int(made.least) < minimum:
                self.stopped = self._blaming(engine.too_few(self.rounds, int(made.least), minimum))
            elif self._check(made.carry, self.rounds):
                self._carry = made.carry
                self.rounds += 1
                self._have_written()
                self.coordinator.links.keep_heads(self.coordinator.run, self.rounds)
                done.append(amounts)
                continue
            break
        return done

    def _have_written(self) -> None:
        self.wrote = self.wrote.copy()
        self.wrote[list(self.coordinator.wrote)] = self.rounds

    def measure(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """See `engine.Session.measure`: with faults, a site that can't be reached is left out."""
        found = self.coordinator.measure(self.rounds, self._carry.state)
        replied = ~np.isin(np.arange(self._job.clients.n), list(self.coordinator.lost))
        return {name: np.asarray(rows) for name, rows in found.items()}, replied

    def _check(self, carry: Any, t: int) -> bool:
        """Return whether the run goes on: the state and what the sites remember are finite."""
        state = [bool(np.isfinite(np.asarray(leaf, float)).all()) for _, leaf in engine.real_leaves(carry.state)]
        memory_finite = [] if is_private(self._job.channel) else self.coordinator.memory_finite
        finite = [*state, *memory_finite]
        if all(finite):
            return True
        memory = self._traced.start.made.carry.memory  # its structure
        reason = self._blaming(engine.not_finite(t, engine.where_not_finite(carry._replace(memory=memory), finite)))
        if self._job.on_nonfinite == "stop":
            self.stopped = reason
            return False
        self.warned = self.warned or reason
        return True

    def _blaming(self, stopped: Stopped) -> Stopped:
        """Add the sites that sent a wrong reply, or none, in the last phase."""
        who = "; ".join(f"{name} {why.rstrip('.')}" for name, why in self.coordinator.blamed.items())
        return stopped._replace(reason=f"{stopped.reason} ({who}.)") if who else stopped

    def save(self) -> Any:
        """See `engine.Session.save`; it has the server's part."""
        carry, wrote = self._carry, self.wrote if self.durable and self.remembers else None
        return carry.state, carry.server, wrote, carry.noise

    def by_client(self) -> None:
        """None: the sites have what clients remember."""

    def restore(self, saved: Any, rounds: int) -> None:
        """See `engine.Session.restore`."""
        state, server, wrote, noise = saved
        engine.check_noise(self._job, noise)
        if is_private(self._job.channel) and self._job.noise_seed is None:
            noise = engine.noise_root(self._job)  # replies to a round that was interrupted may differ: never its noise
        self._carry, self.rounds = plan.Carry(state, None, None, server, noise), rounds
        if wrote is not None:
            self.wrote = np.asarray(wrote)
            assert self.keepers is not None
            self.keepers.check(self.wrote)

    def close(self) -> None:
        """Release the sites."""
        for site in self.sites:
            site.memory.close()
        self.sites = []
        self.coordinator.links.keep_heads(self.coordinator.run, self.rounds)
        self.coordinator.close(self._why(sys.exception()))

    def _why(self, error: BaseException | None) -> str:
        """Return why the run ends, for the sites; "" if it is complete."""
        if error is None or self.stopped is not None:
            return "" if self.stopped is None else self.stopped.reason
        if isinstance(error, RuntimeError | ValueError) and str(error):
            return printable(error)
        return f"the coordinator has failed ({type(error).__name__}); its log says why."


class Keepers:
    """Has the sites save what they remember, each on its own disk: see `checkpoints.Keepers`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._since: dict[int, int] = {}  # the round that each site went back to

    def open(self, folder: Path, run: str) -> dict[str, list[int]]:
        """Return the rounds that each site has saved of this run; sites in this process save in `folder/sites`."""
        for i, site in enumerate(self._session.sites):
            site.memory.folder = Folder(folder / "sites" / str(i))
        self._session.store = run
        found = self._needed({"what": "open", "name": run})
        return {self._session.coordinator.links.name(i): rounds for i, rounds in found.items()}

    def save(self, keep: int | None) -> bool:
        """Have all sites begin to save; False if one can't be reached, and the run has faults."""
        if self._session.durable:  # sites on a network write whenever they have something new to remember
            return True
        request = {"what": "save", "round": self._session.rounds, "keep": keep}
        return self._session.coordinator.ask_to_save(request) is not None

    def wait(self) -> bool:
        """Wait until all sites have written; False as in `save`."""
        return self._session.durable or self._session.coordinator.ask_to_save({"what": "wait"}) is not None

    def restore(self, done: int) -> None:
        """Have all sites go on from that round, and delete later ones."""
        found = self._needed({"what": "restore", "round": done})
        self._since = {i: rounds[0] for i, rounds in found.items() if self._session.durable and rounds}

    def check(self, wrote: np.ndarray) -> None:
        """Check that no site went back further than it should, e.g. to an old copy of its folder."""
        name = self._session.coordinator.links.name
        for i, since in self._since.items():
            if since < wrote[i]:
                raise ValueError(
                    f"{name(i)} must have its memory of round {wrote[i]}, the last one saved before the checkpoint; it "
                    f"has round {since}. Restore its memory of this run."
                )

    def _needed(self, request: dict[str, Any]) -> dict[int, Any]:
        found = self._session.coordinator.ask_to_save(request)
        if found is None:
            raise RuntimeError(
                "Not all sites can be reached, and a run needs all of them to begin or to resume. Start the others."
            )
        return found
