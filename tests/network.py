"""What tests over TCP need: a port, and certificates."""

import socket
import subprocess
from pathlib import Path

from kvstore.transfer.tls import TlsConfig


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def certificates(folder: Path, name: str = "moonpool") -> TlsConfig:
    """An authority of its own, and one certificate that it signed."""
    new = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    commands = [
        f"req -x509 {new} -days 1 -subj /CN=ca -keyout ca.key -out ca.pem",
        f"req {new} -subj /CN=node -addext subjectAltName=DNS:{name} -keyout key.pem -out node.csr",
        "x509 -req -in node.csr -CA ca.pem -CAkey ca.key -days 1 -copy_extensions copy -out cert.pem",
    ]
    for command in commands:
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    return TlsConfig(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
