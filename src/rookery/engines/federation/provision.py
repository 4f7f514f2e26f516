"""Making and changing kits, with the federation's own certificate authority (CA): new ones, revoked and renewed ones.

Everything is in one folder: `ca` with the CA's private key, and the participants' kits, as they are handed out.
"""

import difflib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rookery.engines.federation.kits import (
    CA,
    COORDINATOR,
    DNS,
    FILES,
    RENEWED,
    REVOKED,
    certificates_module,
    check_names,
    check_private,
    load_kit,
    parse_address,
    read_part,
    read_toml,
    serial_of,
)

_ISSUED = "issued"  # the folder of all certificates, at the CA
_LOCAL = ("localhost", "127.0.0.1", "::1")


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
    _check_days(days)
    certificates = certificates_module()
    if out.exists() and not out.is_dir():
        raise ValueError(f"The kits must be written to a folder; {out} is a file. Give another place.")
    if out.exists() and any(out.iterdir()):
        return _add(out, address, sites, days)
    out.mkdir(parents=True, exist_ok=True)
    ca = certificates.new_authority(days)
    made = [_write(out / CA, {"ca.pem": ca.pem, "key.pem": ca.key_pem()})]
    _relist(out, ca)
    made += [_issue(out, ca, site, address, days) for site in sites]
    return [*made, _issue(out, ca, COORDINATOR, address, days, host, sites, _serials(out, sites))]


def revoke(out: Path, name: str) -> list[Path]:
    """Revoke a participant's certificates, and return the files to copy to the coordinator's kit.

    A running coordinator notices them within a round, and sends the signed list of revoked certificates to the sites.
    A site's folder is deleted, and `make_kits` makes a new one. The coordinator gets a new certificate with a new
    private key, in its folder.

    Arguments:
        out: the folder with all kits.
        name: the site's name, or "coordinator".
    """
    listing, said, ca = _known(out, [name])
    before, folder = said.get("certificates", {}), out / name
    paths = [path for path in _certificate_files(out, name) if path.exists()]
    known = (certificates_module().serials_of(read_part(path)) for path in paths)
    number = _relist(out, ca, {*before.get(name, "").split()}.union(*known))
    files = [out / COORDINATOR / REVOKED]
    if name == COORDINATOR:
        cert, key = ca.reissue(read_part(folder / FILES["cert"]))
        _replace_key(folder / FILES["key"], key)
        _publish(cert, folder / FILES["cert"])
        _record(out, name, cert)
        files = [folder / FILES["key"], folder / FILES["cert"], *files]
    else:
        before = _serials(out, said["sites"]) | before | {name: ""}
        for path in paths:
            path.unlink()
        if folder.exists():
            shutil.rmtree(folder)
    _list(listing, said["address"], said["sites"], before, number)
    return [*files, listing]


def renew(out: Path, names: Sequence[str] = (), days: int | None = None) -> list[Path]:
    """Renew certificates for the same private keys, and return the files to copy to the coordinator's kit.

    The coordinator sends each site its new certificate over the connection. The previous one remains valid until its
    end.

    Arguments:
        out: the folder with all kits.
        names: the participants, including "coordinator"; empty: all that were not revoked.
        days: how long the certificates are valid; None: as long as before.
    """
    if days is not None:
        _check_days(days)
    listing, said, ca = _known(out, names)
    serials = _serials(out, said["sites"]) | said.get("certificates", {})
    revoked = [name for name in names if serials.get(name) == ""]
    if revoked:
        raise ValueError(
            f"{revoked[0]!r} must not be revoked; it is. Make a new kit for it with `rookery federation init`."
        )
    files = []
    for name in names or [*(site for site in said["sites"] if serials.get(site) != ""), COORDINATOR]:
        issued, own, waiting = _certificate_files(out, name)
        old = read_part(issued if issued.exists() else own)
        cert = ca.renew(old, days)
        _record(out, name, cert, old)
        if own.parent.exists():
            _publish(cert, own)
        if name == COORDINATOR:
            files.append(own)
            continue
        waiting.parent.mkdir(exist_ok=True)
        _publish(cert, waiting)
        serials[name] = f"{serials.get(name, '')} {serial_of(cert)}".strip()
        files.append(waiting)
    _list(listing, said["address"], said["sites"], serials, said.get("revocations", 0))
    return [*files, listing]


def _add(out: Path, address: str, sites: Sequence[str], days: int) -> list[Path]:
    """Add sites to the kits in a folder."""
    listing = out / COORDINATOR / "kit.toml"
    ca_paths = (out / CA / "ca.pem", out / CA / "key.pem")
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
    check_private(ca_paths[1])
    ca = certificates_module().load_authority(ca_paths, tuple(map(read_part, ca_paths)))
    if known.ca != ca.pem:
        raise ValueError(f"{listing.parent} must be made by the CA in {out / CA}; it was not. Give another folder.")
    names = [*known.sites, *(site for site in sites if site not in known.sites)]
    check_names(names)
    new = [site for site in sites if not (out / site).exists()]
    for site in sites:
        if site not in known.sites and site not in new and load_kit(out / site).ca != ca.pem:
            raise ValueError(f"{out / site} must be made by the CA in {out / CA}; it was not. Give another name.")
    if not new and len(names) == len(known.sites):
        these = "These sites already have their kits" if len(sites) > 1 else "This site already has its kit"
        raise ValueError(f"{these}. To make one anew, call `rookery federation revoke` first.")
    anew = {serial for site in new for serial in known.certificates.get(site, "").split()}
    number = _relist(out, ca, anew) if anew or not (out / CA / REVOKED).exists() else known.revocations
    made = [_issue(out, ca, site, address, days) for site in new]
    kept = {site: serial for site, serial in known.certificates.items() if site not in new}
    _list(listing, address, names, _serials(out, names) | kept, number)
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
    hosts = [host] if host else [name] if DNS.fullmatch(name) else []  # the names that TLS accepts
    hosts += ["localhost", "127.0.0.1"] if host in _LOCAL else []
    cert, key = ca.issue(name, days, list(dict.fromkeys(hosts)), server=bool(host))
    content = read_part(out / CA / REVOKED)
    listing = _toml(address, name, sites, serials, _number(ca, content))
    _record(out, name, cert)
    return _write(
        out / name, {"ca.pem": ca.pem, "cert.pem": cert, "key.pem": key, REVOKED: content, "kit.toml": listing}
    )


def _check_days(days: int) -> None:
    if not isinstance(days, int) or not 1 <= days <= 36500:
        raise ValueError(f"days must be a whole number from 1 to 36500; got {days!r}.")


def _known(out: Path, names: Sequence[str]) -> tuple[Path, dict[str, Any], Any]:
    """Return the path and content of the coordinator's kit.toml, and the CA; ValueError for unknown participants."""
    certificates, listing = certificates_module(), out / COORDINATOR / "kit.toml"
    if not listing.exists():
        raise ValueError(f"{out} must be a folder of `rookery federation init`; it has no {COORDINATOR}/kit.toml.")
    said = read_toml(listing)
    there = [*said.get("sites", []), COORDINATOR]
    for name in names:
        if name not in there:
            near = difflib.get_close_matches(name, there, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(there)}."
            raise ValueError(f"There is no participant {name!r} in {listing}; {hint}")
    paths = (out / CA / "ca.pem", out / CA / "key.pem")
    check_private(paths[1])
    return listing, said, certificates.load_authority(paths, tuple(map(read_part, paths)))


def _certificate_files(out: Path, name: str) -> tuple[Path, Path, Path]:
    """Return where a participant's certificate is: at the CA, in its kit, and where it waits for a site."""
    return (
        out / CA / _ISSUED / f"{name}.pem",
        out / name / FILES["cert"],
        out / COORDINATOR / RENEWED / f"{name}.pem",
    )


def _record(out: Path, name: str, cert: bytes, old: bytes = b"") -> None:
    """Keep a participant's new certificate at the CA together with all earlier ones, so that all can be revoked."""
    path = _certificate_files(out, name)[0]
    _publish(cert + (read_part(path) if path.exists() else old), path)


def _relist(out: Path, ca: Any, serials: Iterable[str] = ()) -> int:
    """Write a new list of revoked certificates, with these as well, to all kits in a folder, and return its number."""
    from rookery.engines.federation.revocations import make_list, read_list

    path = out / CA / REVOKED
    before = read_list(ca.pem, read_part(path)) if path.exists() else None
    number = 1 if before is None else before.number + 1
    content = make_list(ca, number, {*serials, *(before.serials if before else ())})
    kits = [kit.parent for kit in out.glob("*/kit.toml")]
    _publish(content, path, *(kit / REVOKED for kit in kits))
    return number


def _number(ca: Any, content: bytes) -> int:
    from rookery.engines.federation.revocations import read_list

    return read_list(ca.pem, content).number


def _publish(content: bytes, *paths: Path) -> None:
    from rookery.engines.federation.revocations import replace_file

    for path in paths:
        path.parent.mkdir(exist_ok=True)
        replace_file(path, content)


def _replace_key(path: Path, content: bytes) -> None:
    """Replace a private key in one step."""
    beside = path.with_suffix(".new")
    beside.unlink(missing_ok=True)
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    beside.replace(path)


def _serials(out: Path, sites: Sequence[str]) -> dict[str, str]:
    """Return the serial numbers of the certificates in the sites' folders, where there are any."""
    paths = {site: out / site / FILES["cert"] for site in sites}
    return {site: serial_of(read_part(path)) for site, path in paths.items() if path.exists()}


def _list(listing: Path, address: str, sites: Sequence[str], serials: dict[str, str], number: int) -> None:
    """Replace the coordinator's lists."""
    _publish(_toml(address, COORDINATOR, sites, serials, number), listing)


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


def _toml(
    address: str, name: str, sites: Sequence[str] | None, serials: Mapping[str, str] | None, number: int
) -> bytes:
    lines = [f"address = {json.dumps(address)}", f"name = {json.dumps(name)}"]
    if number:
        lines.append(f"revocations = {number}  # the least number of {REVOKED}")
    if sites is not None:
        lines.append(f"sites = {json.dumps(list(sites))}")
    if serials:
        note = "# The serial numbers of the certificates that each site may connect with; none if it is empty."
        lines += ["", note, "[certificates]", *(f"{site} = {json.dumps(serial)}" for site, serial in serials.items())]
    return ("\n".join(lines) + "\n").encode()
