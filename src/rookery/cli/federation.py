"""`rookery federation`: make and revoke kits of certificates for the participants of a federation."""

from pathlib import Path
from typing import Annotated

import typer

from rookery.cli.lookup import split_names
from rookery.cli.options import AsJson, Quiet
from rookery.cli.program import Command, app
from rookery.cli.terminal import show, writable

federation = typer.Typer(no_args_is_help=True)
app.add_typer(federation, name="federation")


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
    from rookery.engines.federation import kits

    try:
        made = kits.make_kits(writable(out), coordinator, split_names(sites), days)
    except ImportError as error:
        raise ValueError(str(error)) from None
    secret = "Keys are secret: send each kit over a safe channel, and only to its participant."
    show(quiet, json, {"kits": made}, *(f"{path}: {_contents(path.name)}" for path in made), secret)


@federation.command(cls=Command)
def revoke(
    site: Annotated[str, typer.Argument(help="The site's name.")],
    folder: Annotated[Path, typer.Option("--kits", help="The folder written by `federation init`.")] = Path("kits"),
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Revoke a site's certificate, so that the coordinator refuses it."""
    from rookery.engines.federation import kits

    try:
        listing = kits.revoke(folder, site)
    except ImportError as error:
        raise ValueError(str(error)) from None
    show(
        quiet,
        json,
        {"revoked": site, "listing": listing},
        f"The certificate of {site} is revoked. Copy {listing} to the coordinator's kit.",
        f"`rookery federation init` with --sites {site} makes a new kit for it.",
    )


def _contents(name: str) -> str:
    from rookery.engines.federation.kits import COORDINATOR

    if name == "ca":
        return "the key of the certificate authority, which adds sites; keep it, and keep it secret"
    return "the coordinator's kit" if name == COORDINATOR else f"the kit of site {name}"
