"""A provisioned FLARE federation on this machine: a server, sites and an administrator, each with its own kit."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ADMIN = "admin@example.org"
ALLOWED = ["nvflare.collab.runtime.", "rookery.engines.", "nvflare.app_common.logging."]
PROJECT = """\
api_version: 3
name: rookery
participants:
  - {{name: localhost, type: server, org: lab, fed_learn_port: {0}, admin_port: {1}}}
{2}
  - {{name: {3}, type: admin, org: lab, role: project_admin}}
builders:
  - {{path: nvflare.lighter.impl.workspace.WorkspaceBuilder, args: {{template_file: [master_template.yml]}}}}
  - {{path: nvflare.lighter.impl.static_file.StaticFileBuilder, args: {{config_folder: config, scheme: tcp}}}}
  - {{path: nvflare.lighter.impl.cert.CertBuilder}}
  - {{path: nvflare.lighter.impl.signature.SignatureBuilder}}
"""


class Loopback:
    """The federation's processes.

    Arguments:
        folder: for everything.
        sites: names.
        path: folders to put on the participants' PYTHONPATH.
    """

    def __init__(self, folder: Path, sites: list[str], path: list[Path]) -> None:
        self.folder, self.sites = folder, sites
        python = Path(sys.executable).parent
        self.env = {
            **os.environ,
            "PATH": f"{python}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "HOME": str(folder),
            "JAX_ENABLE_X64": "1",
            "JAX_PLATFORMS": "cpu",
        }
        ports = _free_ports()
        clients = "\n".join(f"  - {{name: {site}, type: client, org: lab}}" for site in sites)
        (folder / "project.yml").write_text(PROJECT.format(*ports, clients, ADMIN))
        command = [str(python / "nvflare"), "provision", "-p", "project.yml", "-w", "kits"]
        subprocess.run(command, cwd=folder, env=self.env, check=True, capture_output=True, timeout=60)
        self.kits = folder / "kits" / "rookery" / "prod_00"
        self.admin = self.kits / ADMIN
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("localhost", *sites):
            self._settle(name)

    def kit(self, name: str) -> Path:
        """A participant's folder."""
        return self.kits / name

    def _settle(self, name: str) -> None:
        """A participant's own settings: no shipped code, our classes, quiet logs, storage in its folder."""
        local = self.kit(name) / "local"
        resources = json.loads((local / "resources.json.default").read_text())
        resources |= {"class_allow_list": ALLOWED, "allow_log_streaming": False}
        for component in resources["components"]:
            if component["id"] == "job_scheduler":
                component["args"]["min_schedule_interval"] = 1
            if component["id"] == "job_manager":
                component["args"]["uri_root"] = str(self.kit(name) / "jobs")
        if "snapshot_persistor" in resources:
            storage = resources["snapshot_persistor"]["args"]["storage"]["args"]
            storage["root_dir"] = str(self.kit(name) / "snapshots")
        (local / "resources.json").write_text(json.dumps(resources))
        rights = json.loads((local / "authorization.json.default").read_text())
        granted = ("submit_job", "manage_job", "download_job", "view", "operate", "app_command")
        rights["permissions"]["project_admin"] = dict.fromkeys(granted, "any") | {"byoc": "none"}
        (local / "authorization.json").write_text(json.dumps(rights))
        quiet = (local / "log_config.json.default").read_text().replace('"INFO"', '"WARNING"')
        (local / "log_config.json").write_text(quiet)

    def start(self, name: str) -> None:
        """A participant's process."""
        with open(self.folder / f"{name}.out", "ab") as log:
            self._processes[name] = subprocess.Popen(
                [str(self.kit(name) / "startup" / "sub_start.sh"), "--once"],
                cwd="/",
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start_all(self, session: Any, seconds: float = 90) -> None:
        """All of them, until all sites are connected; `session()` opens an administrator's."""
        for name in ("localhost", *self.sites):
            self.start(name)
        end, last = time.monotonic() + seconds, ""
        while time.monotonic() < end:
            try:
                opened = session()
                try:
                    while time.monotonic() < end:
                        if {c.name for c in opened.get_connected_client_list()} >= set(self.sites):
                            return
                        time.sleep(0.5)
                finally:
                    opened.close()
            except Exception as error:
                last = str(error)
                time.sleep(1)
        raise TimeoutError(f"the federation is not up after {seconds} s: {last}\n{self.logs()}")

    def workers(self, name: str) -> list[int]:
        """The ids of a participant's job processes."""
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                words = (place / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if any("worker_process" in w or "runner_process" in w for w in words) and str(self.kit(name)) in words:
                found.append(int(place.name))
        return found

    def logs(self) -> str:
        """The last lines of what was logged."""
        paths = [*self.folder.glob("*.out"), *self.kits.glob("*/error_log.txt"), *self.kits.glob("*/*/error_log.txt")]
        return "\n".join(
            f"--- {path}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:]) for path in paths
        )

    def stop(self) -> None:
        """End every process that this object started, and their job processes."""
        own = [pid for name in self._processes for pid in self.workers(name)]
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        for pid in own:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]
