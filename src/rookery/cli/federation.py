"""`rookery federation`: kits of certificates for the participants of a federation, made and revoked."""

from pathlib import Path
from typing import Annotated

import typer

from rookery.cli.program import AsJson, Command, Quiet, app, border, say, writable

federation = typer.Typer(no_args_is_help=True)
app.add_typer(federation, name="federation")


@federation.callback()
def _group() -> None:
    """Set up a federation over a network."""


@federation.command(cls=Command)
def init(
    coordinator: Annotated[str, typer.Option(help="HOST or HOST:PORT that sites connect to; port 9443 if left out.")],
    sites: Annotated[str, typer.Option(help="The sites' names, a,b,c.")],
    out: Annotated[Path, typer.Option(help="Folder to write to; sites are added to one that has kits.")] = Path("kits"),
    days: Annotated[int, typer.Option(help="How long the certificates are valid.")] = 365,
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Make a kit for the coordinator and for each site: certificate, private key, address. See what it writes."""
    from rookery import report as reports
    from rookery.engines.federation import kits

    with border():
        names = [name.strip() for name in sites.split(",") if name.strip()]
        try:
            made = kits.make_kits(writable(out), coordinator, names, days)
        except ImportError as error:
            raise ValueError(str(error)) from None
        if json:
            print(reports.to_json({"kits": [str(path) for path in made]}))
        say(quiet, json, *(f"{path}: {_what(path.name)}" for path in made))
        say(quiet, json, "Keys are secret: send each kit over a safe channel, and to its participant alone.")


@federation.command(cls=Command)
def revoke(
    site: Annotated[str, typer.Argument(help="The site's name.")],
    folder: Annotated[Path, typer.Option("--kits", help="The folder that `federation init` has written.")] = Path(
        "kits"
    ),
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Have the coordinator refuse a site's certificate, from now on."""
    from rookery import report as reports
    from rookery.engines.federation import kits

    with border():
        try:
            listing = kits.revoke(folder, site)
        except ImportError as error:
            raise ValueError(str(error)) from None
        if json:
            print(reports.to_json({"revoked": site, "listing": str(listing)}))
        say(quiet, json, f"The certificate of {site} is revoked. Copy {listing} to the coordinator's kit.")
        say(quiet, json, f"`rookery federation init` with --sites {site} makes a new kit for it.")


def _what(name: str) -> str:
    from rookery.engines.federation.kits import COORDINATOR

    if name == "ca":
        return "the certificate authority's own key, which adds sites; keep it, and give it to nobody"
    return "the coordinator's kit" if name == COORDINATOR else f"the kit of site {name}"
