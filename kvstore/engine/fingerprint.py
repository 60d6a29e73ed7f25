"""What names a model's weights in block hashes: equal weights give equal names on every machine."""

import json
from pathlib import Path

from blake3 import blake3

_SAMPLES = 256
_SAMPLE_BYTES = 64 * 1024
# What an engine or a download may rewrite without changing a single KV value.
_NAMES_ONLY = {
    "_name_or_path",
    "_model_name_or_path",
    "transformers_version",
    "architectures",
    "torch_dtype",
    "dtype",
}


def weights_folder(model: str) -> Path:
    """Where the weights lie: the folder itself, or where a hub id was downloaded to."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, local_files_only=True))


def model_fingerprint(model: Path) -> str:
    """32 hex digits naming the configuration and weights in the folder `model`.

    Weight files count by size and 256 evenly spaced samples of 64 KiB each (small files whole), so that 140 GB take
    a second; any training step changes every tensor, and so some sample. Raises FileNotFoundError naming what is
    missing.
    """
    weights = sorted(model.glob("*.safetensors")) or sorted(model.glob("*.bin"))
    if not weights:
        raise FileNotFoundError(f"no weights (*.safetensors or *.bin) in {model}")
    config = json.loads((model / "config.json").read_text())
    hasher = blake3(b"moonpool-model-1")
    hasher.update(
        json.dumps({k: v for k, v in config.items() if k not in _NAMES_ONLY}, sort_keys=True).encode()
    )
    for path in weights:
        size = path.stat().st_size
        hasher.update(f"{path.name}/{size}".encode())
        step = max(_SAMPLE_BYTES, size // _SAMPLES)
        with path.open("rb") as file:
            for offset in range(0, size, step):
                file.seek(offset)
                hasher.update(file.read(_SAMPLE_BYTES))
    return hasher.hexdigest()[:32]
