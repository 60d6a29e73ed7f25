"""Regenerates the committed code of every .proto file in the packages.

    .venv/bin/python scripts/protos.py [ROOT]

Beside each `x.proto` lie `x_pb2.py`, `x_pb2_grpc.py` and their type stubs. They are generated with the repository
root as include path, so that they import each other by their packages' full names.
"""

import sys
from importlib.resources import files
from pathlib import Path

PACKAGES = ("cluster", "kvstore", "prefill_worker", "decode_worker")


def protos(root: Path) -> list[Path]:
    """The .proto files of the packages, relative to the root."""
    found = (path for package in PACKAGES for path in (root / package).rglob("*.proto"))
    return sorted(path.relative_to(root) for path in found)


def generate(root: Path, out: Path) -> None:
    """Writes the code of every .proto file under `root` to the same folders under `out`."""
    from grpc_tools import protoc

    names = [str(path) for path in protos(root)]
    if not names:
        return
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={root}",
            f"--proto_path={files('grpc_tools') / '_proto'}",
            f"--plugin=protoc-gen-mypy={Path(sys.executable).parent / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={Path(sys.executable).parent / 'protoc-gen-mypy_grpc'}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--mypy_grpc_out=quiet:{out}",
            *names,
        ]
    )
    if status != 0:
        raise SystemExit(f"protoc failed with status {status} on {', '.join(names)}")


if __name__ == "__main__":
    here = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    generate(here, here)
