"""`rookery federation`: make, renew and revoke kits of certificates for the participants of a federation."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from rookery.cli.lookup import split_names
from rookery.cli.options import AsJson, Quiet
from rookery.cli.program import Command, app
from rookery.cli.terminal import show, writable

federation = typer.Typer(no_args_is_help=True)
app.add_typer(federation, name="federation")
KitsFolder = Annotated[Path, typer.Option("--kits", help="The folder written by `federation init`.")]


@federation.callback()
def _group() -> None:
    """Set up a federation over a network."""


@federation.command(cls=Command)
def init(
    coordinator: Annotated[str, typer.Option(help="HOST or HOST:PORT that sites connect to. Default port: 9443.")],
    sites: Annotated[str, typer.Option(help="The sites' names, a,b,c.")],
    out: Annotated[Path, typer.Option(help="Folder to write to; to one with kits, sites are added.")] = Path("kits"),
    days: Annotated[int, typer.Option(help="Days that the certificates are valid.")] = 365,
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Make a kit for the coordinator and for each site: a certificate, a private key and an address."""
    from rookery.engines.federation import provision

    with _needed():
        made = provision.make_kits(writable(out), coordinator, split_names(sites), days)
    secret = "Keys are secret: send each kit over a safe channel, and only to its participant."
    show(quiet, json, {"kits": made}, *(f"{path}: {_contents(path.name)}" for path in made), secret)


@federation.command(cls=Command)
def revoke(
    name: Annotated[str, typer.Argument(help="The site's name, or coordinator.")],
    folder: KitsFolder = Path("kits"),
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Revoke a participant's certificates, so that nobody can take part with them."""
    from rookery.engines.federation import provision

    with _needed():
        files = provision.revoke(folder, name)
    after = (
        "It has a new one with a new private key: restart it with these. Send revoked.pem to the sites, too."
        if name == "coordinator"
        else f"`rookery federation init` with --sites {name} makes a new kit for it."
    )
    copy = f"The certificate of {name} is revoked. Copy to the coordinator's kit: {', '.join(map(str, files))}."
    show(quiet, json, {"revoked": name, "files": files}, copy, after)


@federation.command(cls=Command)
def renew(
    names: Annotated[list[str] | None, typer.Argument(help="Sites' names, or coordinator. Default: all.")] = None,
    folder: KitsFolder = Path("kits"),
    days: Annotated[
        int | None, typer.Option(help="Days that the certificates are valid. Default: as many as before.")
    ] = None,
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Renew certificates before they end. Private keys stay; the coordinator sends sites their new certificates."""
    from rookery.engines.federation import provision

    with _needed():
        files = provision.renew(folder, names or (), days)
    show(quiet, json, {"files": files}, f"Copy to the coordinator's kit: {', '.join(map(str, files))}.")


def _listed(files: list[Path]) -> str:
    """Name files in a sentence."""
    return ", ".join(map(str, files))


@contextmanager
def _needed() -> Iterator[None]:
    """Report a package that is missing in one line."""
    try:
        yield
    except ImportError as error:
        raise ValueError(str(error)) from None


def _contents(name: str) -> str:
    from rookery.engines.federation.kits import COORDINATOR

    if name == "ca":
        return "the key of the certificate authority, which adds sites; keep it, and keep it secret"
    return "the coordinator's kit" if name == COORDINATOR else f"the kit of site {name}"
