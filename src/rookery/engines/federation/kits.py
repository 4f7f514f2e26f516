"""Kits: the folder that each participant gets, made with the federation's own certificate authority (CA).

It holds the participant's certificate and private key, the CA's certificate, and the coordinator's address.
"""

import ipaddress
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PORT = 9443
COORDINATOR = "coordinator"
CA = "ca"
DNS = re.compile(r"(?=.{1,253}$)(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*", re.IGNORECASE)
REVOKED = "revoked.pem"  # the list of revoked certificates, in every kit
RENEWED = "renewed"  # the folder of certificates that sites have yet to get, in the coordinator's kit
FILES = {"ca": "ca.pem", "cert": "cert.pem", "key": "key.pem"}
_FLARE = (("client.crt", "client.key"), ("server.crt", "server.key"))  # of `nvflare provision`


@dataclass(frozen=True)
class Kit:
    """What a participant needs to take part. `sites` and `certificates` are empty in a site's kit."""

    address: str  # the coordinator's, host:port
    name: str  # the participant's, as in its certificate
    sites: tuple[str, ...]
    ca: bytes = field(repr=False)
    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)
    certificates: dict[str, str] = field(default_factory=dict, repr=False)  # see `accepted`
    folder: Path | None = None  # where it was loaded from, unless that is a folder of `nvflare provision`
    revocations: int = 0  # the least number of its list of revoked certificates


def accepted(path: Path) -> dict[str, str]:
    """Read which certificates each site may connect with: serial numbers, in hexadecimal digits; "" for none.

    From a site that is not listed, any certificate of the federation's CA is accepted: kits of an earlier version have
    no list.
    """
    return read_toml(path).get("certificates", {})


def serial_of(cert: bytes) -> str:
    """Return the serial number of a certificate (PEM), in hexadecimal digits."""
    return certificates_module().serial_of(cert)


def renewed(kit: Kit, site: str) -> bytes:
    """Return the certificate (PEM) that waits in the coordinator's kit for a site; empty if there is none."""
    path = None if kit.folder is None else kit.folder / RENEWED / f"{site}.pem"
    return read_part(path) if path is not None and path.exists() else b""


def revocations(kit: Kit) -> Any:
    """Return a kit's `Revocations`; ValueError if its list of revoked certificates is missing or can't be used."""
    certificates_module()
    from rookery.engines.federation.revocations import Revocations

    return Revocations(kit.ca, None if kit.folder is None else kit.folder / REVOKED, kit.revocations)


def load_kit(folder: Path, address: str | None = None, sites: Sequence[str] = ()) -> Kit:
    """Load a kit of `make_kits`, or a participant's folder of `nvflare provision`; ValueError if it can't be used.

    A folder of `nvflare provision` does not say where Rookery's coordinator is, nor, for the server, which sites there
    are: give `address` and `sites`. For a kit of `make_kits`, they override what it says.
    """
    certificates = certificates_module()
    if not folder.is_dir():
        raise ValueError(
            f"A kit must be a folder; there is none at {folder}. Make kits with `rookery federation init`."
        )
    check_names(sites, least=0)
    paths = _paths(folder)
    said = read_toml(folder / "kit.toml") if not _is_flare(folder) else {}
    check_private(paths["key"])
    contents = {part: read_part(path) for part, path in paths.items()}
    name = certificates.checked_name(paths, contents)
    if said and said["name"] != name:
        raise ValueError(
            f"{folder / 'kit.toml'} must have the name of the certificate, {name}; it has {said['name']}. Copy the kit "
            "again."
        )
    address = address or said.get("address")
    if address is None:
        raise ValueError(
            f"{folder} was made by `nvflare provision`, and does not say where to connect. Give the address."
        )
    sites = tuple(sites) or tuple(said.get("sites", ()))
    kit = Kit(
        parse_address(address)[0], name, sites, **contents, certificates=said.get("certificates", {}),
        folder=folder if said else None, revocations=said.get("revocations", 0),
    )  # fmt: skip
    if kit.folder is not None and kit.revocations:
        read_part(kit.folder / REVOKED)
    if revocations(kit).names(certificates.serial_of(kit.cert)):
        raise ValueError(f"{paths['cert']} must not be revoked; it is. Ask for a new kit.")
    return kit


def parse_address(text: str) -> tuple[str, str]:
    """Return an address as host:port, and its host. The port is 9443 unless given.

    >>> parse_address("fl.example.org")
    ('fl.example.org:9443', 'fl.example.org')
    >>> parse_address("[::1]:8000")
    ('[::1]:8000', '::1')
    """
    bare = re.fullmatch(r"\[?([0-9a-f.]*:[0-9a-f:.]*:[0-9a-f:.]*)\]?", text, re.IGNORECASE)
    found = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+)(?::(\d{1,5}))?", text)
    host, port = (bare[1], None) if bare else (found[1].strip("[]"), found[2]) if found else ("", None)
    number = int(port) if port else PORT
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        ip = None
    numeric = re.fullmatch(r"[\d.]*", host) is not None
    if (ip is None and (numeric or not DNS.fullmatch(host))) or not 0 < number < 65536:
        raise ValueError(f"An address must be a host or host:port, such as fl.example.org:9443; got {text!r}.")
    if ip is not None and ip.is_unspecified:
        raise ValueError(
            f"An address must be one that sites can connect to; got {host}. Give the coordinator's name or address as "
            "sites see it."
        )
    return (f"[{host}]:{number}" if ":" in host else f"{host}:{number}"), host


def check_names(sites: Sequence[str], least: int = 1) -> None:
    """Raise ValueError if these can't be the names of a federation's sites."""
    if len(sites) < least:
        raise ValueError(
            "A federation must have at least one site; got none. Give the sites' names, for example a,b,c."
        )
    for name in sites:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
            raise ValueError(f"A site's name must be 1 to 64 letters, digits, '-' or '_'; got {name!r}.")
        if name.lower() in (COORDINATOR, CA):
            raise ValueError(f"A site's name must not be that of another folder; got {name!r}. Choose another name.")
    lower = [name.lower() for name in sites]
    twice = next((name for name in sites if lower.count(name.lower()) > 1), None)
    if twice is not None:
        raise ValueError(f"Sites must have different names, ignoring case; got {twice!r} twice. Give each its own.")


def certificates_module() -> Any:
    """Return the module `certificates`, which needs a package that may be missing."""
    try:
        import cryptography.x509  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "Certificates need cryptography, which is not installed. Run pip install 'rookery[federation]'."
        ) from error
    from rookery.engines.federation import certificates

    return certificates


def read_toml(path: Path) -> dict[str, Any]:
    content = read_part(path)
    try:
        said = tomllib.loads(content.decode())
    except ValueError as error:
        raise ValueError(f"{path} must be TOML: {error}. Copy the kit again.") from error
    sites, serials = said.get("sites", []), said.get("certificates", {})
    texts = lambda values: all(isinstance(value, str) for value in values)
    if not isinstance(sites, list) or not texts([said.get("address"), said.get("name"), *sites]):
        raise ValueError(
            f"{path} must have texts as address and name, and a list of texts as sites. Copy the kit again."
        )
    if type(said.get("revocations", 0)) is not int or said.get("revocations", 0) < 0:
        raise ValueError(f"{path} must have a whole number as revocations; got {said['revocations']!r}. Copy it again.")
    if not isinstance(serials, dict) or not texts(serials.values()):
        raise ValueError(f"{path} must have a table of texts as certificates; got {serials!r}. Copy the kit again.")
    return said


def _is_flare(folder: Path) -> bool:
    return not (folder / "kit.toml").exists() and (folder / "startup" / "rootCA.pem").exists()


def _paths(folder: Path) -> dict[str, Path]:
    """Return the files of a kit."""
    if not _is_flare(folder):
        return {part: folder / name for part, name in FILES.items()}
    startup = folder / "startup"
    cert, key = next((own for own in _FLARE if (startup / own[0]).exists()), _FLARE[0])
    return {"ca": startup / "rootCA.pem", "cert": startup / cert, "key": startup / key}


def read_part(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"A kit must be complete; there is no {path}. Copy the kit again.") from None
    except OSError as error:
        raise ValueError(f"{path} can't be read ({error.strerror}). Check its permissions.") from None


def check_private(path: Path) -> None:
    if os.name == "posix" and path.exists() and path.stat().st_mode & 0o077:
        raise ValueError(f"The private key {path} must be readable by its owner only. Run chmod 600 {path}.")
