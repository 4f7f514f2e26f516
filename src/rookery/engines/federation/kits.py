"""Kits: the folder that each participant gets, made with the federation's own certificate authority (CA).

It holds the participant's certificate and private key, the CA's certificate, and the coordinator's address.
"""

import difflib
import ipaddress
import json
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PORT = 9443
COORDINATOR = "coordinator"
_CA = "ca"
_LOCAL = ("localhost", "127.0.0.1", "::1")
_DNS = re.compile(r"(?=.{1,253}$)(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*", re.IGNORECASE)
_FILES = {"ca": "ca.pem", "cert": "cert.pem", "key": "key.pem"}
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


def make_kits(out: Path, coordinator: str, sites: Sequence[str], days: int = 365) -> list[Path]:
    """Make a kit for the coordinator and for each site, in folders of `out`, and return the folders made.

    The CA's private key is in `out/ca`, which belongs to nobody's kit. If `out` has kits already, the same CA makes
    kits for the sites that have none; the others stay as they are, except for the coordinator's lists of sites and
    certificates. A kit that was deleted or revoked is made anew, and its earlier certificate is no longer accepted.

    Arguments:
        out: the folder.
        coordinator: the host and port that sites connect to, "fl.example.org:9443"; without a port, 9443.
        sites: their names.
        days: how long the certificates are valid. The CA is valid for ten years, or for `days` if that is longer.
    """
    address, host = parse_address(coordinator)
    check_names(sites)
    if host.lower() in (name.lower() for name in sites):
        raise ValueError(
            f"A site's name must not be the coordinator's host; got {host!r} for both. Choose another name."
        )
    if not isinstance(days, int) or not 1 <= days <= 36500:
        raise ValueError(f"days must be a whole number from 1 to 36500; got {days!r}.")
    certificates = _certificates()
    if out.exists() and not out.is_dir():
        raise ValueError(f"The kits must be written to a folder; {out} is a file. Give another place.")
    if out.exists() and any(out.iterdir()):
        return _add(out, address, sites, days)
    out.mkdir(parents=True, exist_ok=True)
    ca = certificates.new_authority(days)
    made = [_write(out / _CA, {"ca.pem": ca.pem, "key.pem": ca.key_pem()})]
    made += [_issue(out, ca, site, address, days) for site in sites]
    return [*made, _issue(out, ca, COORDINATOR, address, days, host, sites, _serials(out, sites))]


def revoke(out: Path, site: str) -> Path:
    """Have the coordinator refuse a site's certificate, delete the site's folder, and return the file that says so.

    The coordinator needs that file, `kit.toml` of its kit; a running coordinator notices a new one within seconds.
    `make_kits` makes a new kit for the site.

    Arguments:
        out: the folder with all kits.
        site: the site's name.
    """
    _certificates()
    if site == COORDINATOR:
        raise ValueError(
            "site must name a site, because sites keep no list that could revoke the coordinator's certificate; got "
            f"{site!r}. Make new kits for all."
        )
    listing = out / COORDINATOR / "kit.toml"
    if not listing.exists():
        raise ValueError(f"{out} must be a folder of `rookery federation init`; it has no {COORDINATOR}/kit.toml.")
    known = load_kit(listing.parent)
    if site not in known.sites:
        near = difflib.get_close_matches(site, known.sites, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known.sites)}."
        raise ValueError(f"There is no site {site!r} in {listing}; {hint}")
    _list(listing, known, known.sites, known.certificates | _serials(out, known.sites) | {site: ""})
    if (out / site).exists():
        shutil.rmtree(out / site)
    return listing


def accepted(path: Path) -> dict[str, str]:
    """Read which certificate each site may connect with: its serial number, in hexadecimal digits; "" for none.

    From a site that is not listed, any certificate of the federation's CA is accepted: kits of an earlier version have
    no list.
    """
    return _read_toml(path).get("certificates", {})


def serial_of(cert: bytes) -> str:
    """Return the serial number of a certificate (PEM), in hexadecimal digits."""
    return _certificates().serial_of(cert)


def load_kit(folder: Path, address: str | None = None, sites: Sequence[str] = ()) -> Kit:
    """Load a kit of `make_kits`, or a participant's folder of `nvflare provision`; ValueError if it can't be used.

    A folder of `nvflare provision` does not say where Rookery's coordinator is, nor, for the server, which sites there
    are: give `address` and `sites`. For a kit of `make_kits`, they override what it says.
    """
    certificates = _certificates()
    if not folder.is_dir():
        raise ValueError(
            f"A kit must be a folder; there is none at {folder}. Make kits with `rookery federation init`."
        )
    check_names(sites, least=0)
    paths = _paths(folder)
    said = _read_toml(folder / "kit.toml") if not _is_flare(folder) else {}
    _check_private(paths["key"])
    contents = {part: _read(path) for part, path in paths.items()}
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
    return Kit(parse_address(address)[0], name, sites, **contents, certificates=said.get("certificates", {}))


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
    if (ip is None and (numeric or not _DNS.fullmatch(host))) or not 0 < number < 65536:
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
        if name.lower() in (COORDINATOR, _CA):
            raise ValueError(f"A site's name must not be that of another folder; got {name!r}. Choose another name.")
    lower = [name.lower() for name in sites]
    twice = next((name for name in sites if lower.count(name.lower()) > 1), None)
    if twice is not None:
        raise ValueError(f"Sites must have different names, ignoring case; got {twice!r} twice. Give each its own.")


def _certificates() -> Any:
    """Return the module `certificates`, which needs a package that may be missing."""
    try:
        import cryptography.x509  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "Certificates need cryptography, which is not installed. Run pip install 'rookery[federation]'."
        ) from error
    from rookery.engines.federation import certificates

    return certificates


def _add(out: Path, address: str, sites: Sequence[str], days: int) -> list[Path]:
    """Add sites to the kits in a folder."""
    listing = out / COORDINATOR / "kit.toml"
    ca_paths = (out / _CA / "ca.pem", out / _CA / "key.pem")
    for path in (*ca_paths, listing):
        if not path.exists():
            raise ValueError(
                f"{out} must be empty, or a whole set of kits; {path} is missing. Put it back, or give another folder."
            )
    known = load_kit(listing.parent)
    if known.address != address:
        raise ValueError(
            f"The coordinator's address must be that of the kits in {out}, {known.address}; got {address}. Give that "
            "one."
        )
    _check_private(ca_paths[1])
    ca = _certificates().load_authority(ca_paths, tuple(map(_read, ca_paths)))
    if known.ca != ca.pem:
        raise ValueError(f"{listing.parent} must be made by the CA in {out / _CA}; it was not. Give another folder.")
    names = [*known.sites, *(site for site in sites if site not in known.sites)]
    check_names(names)
    new = [site for site in sites if not (out / site).exists()]
    for site in sites:
        if site not in known.sites and site not in new and load_kit(out / site).ca != ca.pem:
            raise ValueError(f"{out / site} must be made by the CA in {out / _CA}; it was not. Give another name.")
    if not new and len(names) == len(known.sites):
        these = "These sites already have their kits" if len(sites) > 1 else "This site already has its kit"
        raise ValueError(f"{these}. To make one anew, call `rookery federation revoke` first.")
    made = [_issue(out, ca, site, address, days) for site in new]
    _list(listing, known, names, known.certificates | _serials(out, names))
    return made


def _issue(
    out: Path,
    ca: Any,
    name: str,
    address: str,
    days: int,
    host: str = "",
    sites: Sequence[str] | None = None,
    serials: Mapping[str, str] | None = None,
) -> Path:
    """Write the kit of a participant. Only the coordinator has a `host` and lists of sites."""
    hosts = [host] if host else [name] if _DNS.fullmatch(name) else []  # the names that TLS accepts
    hosts += ["localhost", "127.0.0.1"] if host in _LOCAL else []
    cert, key = ca.issue(name, days, list(dict.fromkeys(hosts)), server=bool(host))
    listing = _toml(address, name, sites, serials)
    return _write(out / name, {"ca.pem": ca.pem, "cert.pem": cert, "key.pem": key, "kit.toml": listing})


def _serials(out: Path, sites: Sequence[str]) -> dict[str, str]:
    """Return the serial numbers of the certificates in the sites' folders, where there are any."""
    paths = {site: out / site / _FILES["cert"] for site in sites}
    return {site: serial_of(_read(path)) for site, path in paths.items() if path.exists()}


def _list(listing: Path, known: Kit, sites: Sequence[str], serials: dict[str, str]) -> None:
    """Replace the coordinator's lists."""
    beside = listing.with_suffix(".new")
    beside.write_bytes(_toml(known.address, COORDINATOR, sites, serials))
    beside.replace(listing)


def _write(folder: Path, files: dict[str, bytes]) -> Path:
    """Make a folder with these files in one step; only its owner can read the folder and the private key."""
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))  # mode 700
    for name, content in files.items():
        with open(os.open(beside / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        if name != "key.pem":
            (beside / name).chmod(0o644)
    beside.rename(folder)
    return folder


def _toml(address: str, name: str, sites: Sequence[str] | None, serials: Mapping[str, str] | None) -> bytes:
    lines = [f"address = {json.dumps(address)}", f"name = {json.dumps(name)}"]
    if sites is not None:
        lines.append(f"sites = {json.dumps(list(sites))}")
    if serials:
        note = "# The serial number of the one certificate that each site may connect with; none if it is empty."
        lines += ["", note, "[certificates]", *(f"{site} = {json.dumps(serial)}" for site, serial in serials.items())]
    return ("\n".join(lines) + "\n").encode()


def _read_toml(path: Path) -> dict[str, Any]:
    content = _read(path)
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
    if not isinstance(serials, dict) or not texts(serials.values()):
        raise ValueError(f"{path} must have a table of texts as certificates; got {serials!r}. Copy the kit again.")
    return said


def _is_flare(folder: Path) -> bool:
    return not (folder / "kit.toml").exists() and (folder / "startup" / "rootCA.pem").exists()


def _paths(folder: Path) -> dict[str, Path]:
    """Return the files of a kit."""
    if not _is_flare(folder):
        return {part: folder / name for part, name in _FILES.items()}
    startup = folder / "startup"
    cert, key = next((own for own in _FLARE if (startup / own[0]).exists()), _FLARE[0])
    return {"ca": startup / "rootCA.pem", "cert": startup / cert, "key": startup / key}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"A kit must be complete; there is no {path}. Copy the kit again.") from None
    except OSError as error:
        raise ValueError(f"{path} can't be read ({error.strerror}). Check its permissions.") from None


def _check_private(path: Path) -> None:
    if os.name == "posix" and path.exists() and path.stat().st_mode & 0o077:
        raise ValueError(f"The private key {path} must be readable by its owner only. Run chmod 600 {path}.")
