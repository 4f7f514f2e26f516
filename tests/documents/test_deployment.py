"""The container, the service and the page about them name what there is, and give no more rights than needed."""

import fnmatch
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from rookery.cli import program

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
CONTAINER = (PACKAGING / "Containerfile").read_text()
UNIT = (PACKAGING / "rookery-site@.service").read_text()
PAGE = (ROOT / "docs" / "deploy.md").read_text()


def options(command: str) -> set[str]:
    found = program.Commands().get_command(None, command)  # type: ignore[arg-type]
    assert found is not None
    return {option for parameter in found.params for option in parameter.opts}


def commands() -> list[list[str]]:
    """The commands of the page and of the unit, from the word `rookery` on."""
    blocks = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"^ExecStart=(.*)", UNIT, re.MULTILINE)
    words = [[Path(word).name if "bin/rookery" in word else word for word in shlex.split(line)] for line in lines]
    return [line[line.index("rookery") + 1 :] for line in words if "rookery" in line and line[0] != "useradd"]


def test_the_commands_have_these_options() -> None:
    found = commands()
    assert [line[0] for line in found] == ["site", "serve", "site"]
    for name, *words in found:
        assert {word for word in words if word.startswith("--")} <= options(name)


def test_the_container_runs_without_root() -> None:
    steps = [line.split()[0] for line in CONTAINER.splitlines() if re.match(r"[A-Z]+ ", line)]
    assert steps[steps.index("USER") :] == ["USER", "VOLUME", "WORKDIR", "ENV", "ENTRYPOINT", "CMD"]
    (user,) = re.findall(r"^USER (\d+):\1$", CONTAINER, re.MULTILINE)
    assert int(user) > 0
    assert f"--uid {user} " in CONTAINER
    assert "install.sh" in CONTAINER
    allowed = (PACKAGING / "Containerfile.containerignore").read_text().split()
    copied = re.findall(r"^COPY (.*) /tmp", CONTAINER, re.MULTILINE)[0].split()
    assert allowed == ["*", *(f"!{name}" for name in copied)]
    assert all((ROOT / name).exists() for name in copied if "*" not in name)


def test_the_service_has_few_rights() -> None:
    assert "\nUser=rookery\n" in UNIT
    assert {"NoNewPrivileges=yes", "ProtectSystem=strict", "CapabilityBoundingSet="} <= {*UNIT.splitlines()}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not on this machine")
def test_systemd_accepts_the_service(tmp_path: Path) -> None:
    unit = tmp_path / "rookery-site@north.service"
    unit.write_text(UNIT.replace("/opt/rookery/bin/rookery", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "rookery" in line]) == (0, [])
    unit.write_text(UNIT.replace("RestartSec=30", "RestartSek=30"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert "RestartSek" in done.stderr


def test_an_audit_log_is_not_rotated() -> None:
    (pattern,) = re.findall(r"^(/\S+) \{$", (PACKAGING / "logrotate.conf").read_text(), re.MULTILINE)
    assert fnmatch.fnmatch("/var/log/rookery/site.log", pattern)
    for name in ("audit.jsonl", "audit.head", "audit.receipts"):
        assert not fnmatch.fnmatch(f"/var/log/rookery/{name}", pattern)
