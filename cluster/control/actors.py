"""Ray actors: each runs one role in its event loop. Ray places, starts and restarts them, and nothing else."""

import asyncio
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from cluster.control.roles import Settings, run_role
from kvstore.directory.membership import Member
from kvstore.engine.spawned import after_imports, before_imports


class RoleActor:
    """Runs `role` from construction on, so that a restart by Ray runs it again.

    A role that fails at its first start stays to say why; one that fails later ends the process, for Ray to restart.
    Output goes to `log`, of this process and of those that it starts.
    """

    def __init__(self, role: str, settings: Settings, log: Path) -> None:
        if role in ("prefill", "decode"):
            before_imports()
        _redirect_output(log)
        self._ready: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        self._task = asyncio.get_running_loop().create_task(self._run(role, settings))

    async def _run(self, role: str, settings: Settings) -> None:
        try:
            await run_role(role, settings, self._serves)
        except asyncio.CancelledError:
            raise
        except BaseException as failure:  # noqa: BLE001  # the process's edge: whatever ended the role is reported
            traceback.print_exc()
            sys.stderr.flush()
            if self._ready.done() or ray.get_runtime_context().was_current_actor_reconstructed:
                os._exit(1)
            self._ready.set_exception(RuntimeError(f"{type(failure).__name__}: {failure}"))

    def _serves(self, member: Member) -> None:
        after_imports()
        self._ready.set_result(member)

    async def ready(self) -> dict[str, Any]:
        """The member, once the role serves. Raises RuntimeError with the reason if it never will."""
        return asdict(await asyncio.shield(self._ready))

    async def stop(self) -> None:
        """Ends the role in order: services, engine processes, arena."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def _redirect_output(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def start_actor(
    name: str, role: str, settings: Settings, log: Path, environment: dict[str, str], restarts_max: int
) -> Any:
    """A handle on a new actor. It gets no CPU share from Ray: engines set their own threads."""
    remote = ray.remote(RoleActor)
    options = {
        "name": name,
        "num_cpus": 0,
        "max_restarts": restarts_max,
        "max_concurrency": 16,
        "runtime_env": {"env_vars": environment},
    }
    return remote.options(**options).remote(role, settings, log)
