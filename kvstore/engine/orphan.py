"""Ends this process when its parent dies: an engine core without its worker would compute for nobody for ever."""

import os
import select
import threading


def exit_with_parent() -> None:
    """Watches the present parent from a daemon thread; when it is gone this process exits at once, status 1."""
    parent = os.getppid()
    descriptor = os.pidfd_open(parent)

    def watch() -> None:
        select.select([descriptor], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="moonpool-orphan", daemon=True).start()
