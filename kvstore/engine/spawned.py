"""What runs first in a process that will import vLLM, so that the import takes less of the start.

multiprocessing's `spawn` runs the parent's main file again in the child, as `__mp_main__`. In a Ray worker that is
Ray's own start script, of no use in an engine core. `Engine.start` names this file instead.
"""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_LOWERINGS = "torch._inductor.lowering"


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


def before_imports() -> None:
    """Puts off garbage collection, a third of the import's time, and Inductor where nothing is compiled.

    vLLM imports Inductor's lowerings to patch one list, and does without when they cannot be imported. Engines run
    eagerly (`engine_environment` sets TORCHDYNAMO_DISABLE) on CPUs, so nothing else asks for them.
    """
    gc.disable()
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        sys.modules[_LOWERINGS] = None  # type: ignore[assignment]  # Python's own way to say: cannot be imported
        import vllm  # noqa: F401

        del sys.modules[_LOWERINGS]


def after_imports() -> None:
    """Collection goes on; what is there now will mostly stay and is not looked at again."""
    gc.freeze()
    gc.enable()


if __name__ == "__mp_main__":
    before_imports()
