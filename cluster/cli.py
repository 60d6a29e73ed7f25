"""`moonpool`: the command line. Each command is thin: it parses, calls, and shows."""

import json
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.config import API_KEY_VARIABLE, ClusterConfig, ConfigError, load_config

app = typer.Typer(
    help="Serve large language models from prefill nodes, decode nodes and one pool of KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(stderr=True)
ApiKey = Annotated[
    str | None,
    typer.Option(envvar=API_KEY_VARIABLE, help="for a gateway that asks for one", show_default=False),
]


@app.callback()
def main() -> None:
    """Moonpool."""


@app.command()
def up(  # one parameter a flag
    config: Annotated[Path | None, typer.Option(help="TOML file with the configuration tree")] = None,
    model: Annotated[str | None, typer.Option(help="model folder or hub id; none: the default model")] = None,
    prefill: Annotated[int | None, typer.Option(help="prefill workers")] = None,
    decode: Annotated[int | None, typer.Option(help="decode workers")] = None,
    nodes: Annotated[int | None, typer.Option(help="KV nodes, as if on so many machines")] = None,
    host: Annotated[str | None, typer.Option(help="gateway address")] = None,
    port: Annotated[int | None, typer.Option(help="gateway port; 0: any free one")] = None,
    api_keys: Annotated[Path | None, typer.Option(help="file of API keys; none: everyone may ask")] = None,
    tool_call_parser: Annotated[str | None, typer.Option(help="vLLM's parser of tool calls")] = None,
    reasoning_parser: Annotated[str | None, typer.Option(help="vLLM's parser of reasoning")] = None,
    dram_bytes: Annotated[int | None, typer.Option(help="size of the shared-memory KV arena")] = None,
    ssd_dir: Annotated[Path | None, typer.Option(help="folder of the SSD tier; none: no such tier")] = None,
    ssd_bytes: Annotated[int | None, typer.Option(help="how much of the disk each node may take")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="context length in tokens")] = None,
    policy: Annotated[str | None, typer.Option(help="how workers are chosen for a request")] = None,
) -> None:
    """Start a cluster on this machine and serve until Ctrl-C."""
    settings = _configured(
        config,
        {
            "model": model,
            "prefill": prefill,
            "decode": decode,
            "nodes": nodes,
            "gateway": {
                "host": host,
                "port": port,
                "api_keys": api_keys,
                "tool_call_parser": tool_call_parser,
            },
            "pool": {"dram_bytes": dram_bytes, "ssd_dir": ssd_dir, "ssd_bytes": ssd_bytes},
            "engine": {"max_model_len": max_model_len, "reasoning_parser": reasoning_parser},
            "scheduling": {"policy": policy},
        },
    )
    from cluster.control.local import LocalCluster, Part, PartFailedError
    from cluster.model import ModelError

    console.print_json(settings.model_dump_json(exclude_none=True), indent=None)
    stop = _stop_signal()
    cluster: LocalCluster | None = None
    try:
        with Live(console=console, refresh_per_second=4, transient=False) as live:

            def show(parts: list[Part]) -> None:
                live.update(
                    _parts_table([(part.name, part.state, _seconds(part), part.where) for part in parts])
                )
                if stop.is_set():
                    raise KeyboardInterrupt

            cluster = LocalCluster(settings, show)
            cluster.start()
        _say_ready(cluster.url, cluster.model_name, cluster.run_dir)
        while not stop.wait(1.0):
            cluster.check()
    except KeyboardInterrupt:
        pass
    except (PartFailedError, ModelError, OSError) as error:
        console.print(f"[bold red]{error}", highlight=False)
        raise typer.Exit(1) from error
    finally:
        if cluster is not None:
            with console.status("stopping"):
                cluster.stop()
    console.print("stopped")


@app.command()
def pool(
    action: Annotated[Literal["inspect", "verify", "drop"], typer.Argument(help="what to do on every node")],
    tier: Annotated[str, typer.Option(help="drop: only from dram, or only from ssd")] = "",
    url: Annotated[str, typer.Option(help="the gateway")] = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
) -> None:
    """Look into the KV pool: what each node holds, whether it verifies; or empty it."""
    import grpc

    from cluster.control import pool as nodes

    members = [
        member for member in _get(f"{url}/moonpool/v1/status", api_key)["members"] if member["role"] == "node"
    ]
    shown = Console()
    for member in members:
        try:
            shown.print(nodes.ACTIONS[action](member["id"], member["address"], tier))
        except grpc.RpcError as error:
            console.print(f"[bold red]{member['id']}: {error.details()}", highlight=False)
            raise typer.Exit(1) from error


@app.command()
def status(
    url: Annotated[str, typer.Option(help="the gateway")] = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, once")] = False,
    once: Annotated[
        bool, typer.Option("--once", help="do not stay; the default where no terminal is")
    ] = False,
) -> None:
    """Show a running cluster until Ctrl-C: members, load, pool."""
    address, shown = f"{url}/moonpool/v1/status", Console()
    if as_json:
        print(json.dumps(_get(address, api_key), indent=2))
    elif once or not shown.is_terminal:
        shown.print(_cluster_view(_get(address, api_key)))
    else:
        with Live(console=shown, auto_refresh=False) as live, suppress(KeyboardInterrupt):
            while True:
                live.update(_cluster_view(_get(address, api_key)), refresh=True)
                time.sleep(1.0)


@app.command()
def explain(
    request: Annotated[str, typer.Argument(help="the id that the answer carried")],
    url: Annotated[str, typer.Option(help="the gateway")] = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
) -> None:
    """Show what was decided for one request, and what happened."""
    Console().print_json(json.dumps(_get(f"{url}/moonpool/v1/requests/{request}", api_key)))


@app.command()
def sim(  # one parameter a flag
    trace: Annotated[list[Path], typer.Option(help="a trace in Mooncake's format; several make a sweep")],
    policy: Annotated[
        list[str] | None, typer.Option(help="how workers are chosen; several make a sweep")
    ] = None,
    rate: Annotated[
        list[float] | None, typer.Option(help="multiple of the trace's rate; several: a sweep")
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="PREFILL+DECODE nodes, as 8+8; several: a sweep")
    ] = None,
    profile: Annotated[str, typer.Option(help="what a node is: a name or a .toml file")] = "llama-70b-8xa800",
    slo_ttft: Annotated[float | None, typer.Option(help="seconds to the first token")] = 30.0,
    slo_tbt: Annotated[float | None, typer.Option(help="seconds between tokens")] = 0.1,
    overload: Annotated[str, typer.Option(help="off, none, early, predictive or reserved")] = "reserved",
    option: Annotated[list[str] | None, typer.Option(help="NAME=NUMBER, of the policy")] = None,
    chunk_tokens: Annotated[int, typer.Option(help="of a prompt that a decode engine computes")] = 2048,
    prediction_error: Annotated[float, typer.Option(help="of each prefill's seconds, as a share")] = 0.0,
    requests: Annotated[int | None, typer.Option(help="only so many of the trace")] = None,
    seed: int = 0,
    processes: Annotated[int | None, typer.Option(help="at most; none: one a core")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="write all figures here")] = None,
    html: Annotated[Path | None, typer.Option(help="write a report with plots here")] = None,
    explain: Annotated[int | None, typer.Option(help="show the decision for this request, from 0")] = None,
) -> None:
    """Replay traces through the conductor on simulated nodes."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from cluster.core.state import Overload, Slo
    from cluster.sim import profiles, report, sweep
    from cluster.sim.driver import Scenario

    try:
        base = Scenario(
            profile=profiles.profile(profile),
            prefill=1,
            decode=1,
            options=tuple(_option(text) for text in option or ()),
            overload=Overload(overload),
            slo=Slo(ttft_s=slo_ttft, tbt_s=slo_tbt),
            seed=seed,
            prediction_error=prediction_error,
            chunk_tokens=chunk_tokens,
        )
        made = sweep.scenarios(
            base, policy or ["load"], rate or [1.0], [_shape(text) for text in shape or ["8+8"]]
        )
        if explain is not None:
            rows = sweep.load_trace(trace[0], requests, seed)
            Console().print_json(json.dumps(sweep.explained(made[0], rows, explain)))
            return
        todo = [(scenario, path) for path in trace for scenario in made]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("simulating", total=len(todo))

            def done(ran: sweep.Ran) -> None:
                progress.update(task, advance=1, description=ran.name)

            runs = sweep.run_all(todo, requests, processes, done)
    except (ValueError, OSError) as error:
        console.print(f"[bold red]{error}", highlight=False)
        raise typer.Exit(2) from error
    table = Table(
        "run", "meet both", "goodput/s", "refused", "missed", "hits", "TTFT", "p90", "TBT p90", box=None
    )
    for ran in runs:
        table.add_row(*report.cells(ran))
    Console().print(table)
    if as_json is not None:
        sweep.write_json(as_json, runs)
    if html is not None:
        report.write_html(html, runs, f"Moonpool: {len(runs)} simulated runs")


def _option(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        return name, float(number)
    except ValueError:
        raise ValueError(f"an option is NAME=NUMBER, not {text!r}") from None


def _shape(text: str) -> tuple[int, int]:
    prefill, plus, decode = text.partition("+")
    if not (plus and prefill.isdecimal() and decode.isdecimal()):
        raise ValueError(f"a shape is PREFILL+DECODE, as 8+8, not {text!r}")
    return int(prefill), int(decode)


def _configured(path: Path | None, flags: dict[str, Any]) -> ClusterConfig:
    try:
        return load_config(path, flags)
    except ConfigError as error:
        console.print(f"[bold red]{error}", highlight=False)
        raise typer.Exit(2) from error


def _stop_signal() -> threading.Event:
    """Set by the first SIGINT or SIGTERM; a second one is not needed and is ignored."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def _parts_table(rows: list[tuple[str, str, str, str]]) -> Table:
    table = Table(box=None, padding=(0, 2), show_header=False)
    for row in rows:
        colour = {"ready": "green", "failed": "red"}.get(row[1], "yellow")
        table.add_row(row[0], f"[{colour}]{row[1]}", row[2], f"[dim]{row[3]}")
    return table


def _cluster_view(data: dict[str, Any]) -> Group:
    """One row a member with its load; what the conductor counts goes below. `data` is what the gateway's status says."""
    conductor = data.get("conductor") or {"workers": [], "nodes": [], "inflight": {}, "counts": {}}
    workers = {row["worker"]: row for row in conductor["workers"]}
    nodes = {row["node"]: row for row in conductor["nodes"]}
    table = Table(box=None, padding=(0, 2))
    for heading in ("member", "role", "load", "pid", "address"):
        table.add_column(heading)
    for member in sorted(data.get("members", []), key=lambda member: str(member["id"])):
        name, load = member["id"], ""
        if name in workers:
            row = workers[name]
            waits = (
                f"{row['queue_s']:.1f} s queued"
                if row["role"] == "prefill"
                else f"{row['context_tokens']} tokens"
            )
            load = f"{row['requests']} requests, {waits}"
        elif name in nodes:
            load = f"{nodes[name]['blocks']} blocks"
        table.add_row(name, member["role"], load, str(member["pid"]), member["address"])
    counted = (
        " · ".join(f"{n} {what}" for what, n in conductor[each].items()) for each in ("inflight", "counts")
    )
    return Group(table, *(Text(f"  {line}", style="dim") for line in counted))


def _seconds(part: Any) -> str:
    taken = part.seconds or time.monotonic() - part.started_s
    return f"{taken:5.1f} s"


def _say_ready(url: str, model: str, run_dir: Path) -> None:
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    )
    console.print(f"\n[bold green]serving[/] {model} at {url}  [dim](logs in {run_dir}/logs; Ctrl-C stops)")
    print(f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)


def _get(url: str, api_key: str | None) -> Any:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key is not None else {}
    try:
        response = httpx.get(url, timeout=10.0, headers=headers)
    except httpx.TransportError as error:
        console.print(f"[bold red]no gateway answers at {url}: {error}", highlight=False)
        raise typer.Exit(1) from error
    if response.status_code != httpx.codes.OK:
        console.print(f"[bold red]{url}: {response.status_code} {response.text}", highlight=False)
        raise typer.Exit(1)
    return response.json()


if __name__ == "__main__":
    sys.exit(app())
