"""What runs first in an engine core.

multiprocessing's `spawn` runs the parent's main file again in the child, as `__mp_main__`. In a Ray worker that is
Ray's own start script, of no use there. `Engine.start` names this file instead: it puts off garbage collection, which
costs a third of the time that importing vLLM takes; `after_imports` turns it on again.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def as_main_of_children() -> Iterator[None]:
    """Processes spawned meanwhile run this file as their main."""
    main = sys.modules["__main__"]
    kept = {name: main.__dict__.get(name) for name in ("__file__", "__spec__")}
    main.__dict__.update({"__file__": __file__, "__spec__": None})
    try:
        yield
    finally:
        main.__dict__.update(kept)


def put_off_collection() -> None:
    """Before heavy imports."""
    gc.disable()


def after_imports() -> None:
    """What is there now will mostly stay: it need not be looked at again."""
    gc.freeze()
    gc.enable()


if __name__ == "__mp_main__":
    put_off_collection()
