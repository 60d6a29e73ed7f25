import subprocess
import sys
from pathlib import Path

import pytest

from scripts.protos import protos

ROOT = Path(__file__).resolve().parents[2]
ENDINGS = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made in a process of its own: what other tests have loaded into this one may hold another protobuf."""
    out = tmp_path_factory.mktemp("generated")
    code = f"from pathlib import Path; from scripts.protos import generate; generate(Path({str(ROOT)!r}), Path({str(out)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    return out


@pytest.mark.parametrize("proto", protos(ROOT), ids=str)
def test_the_committed_code_is_what_its_proto_generates(proto: Path, fresh: Path) -> None:
    for ending in ENDINGS:
        name = proto.with_name(proto.stem + ending)
        assert (ROOT / name).read_text() == (fresh / name).read_text(), f"{name} is stale: run `make protos`"


def test_no_generated_code_outlives_its_proto() -> None:
    expected = {proto.with_name(proto.stem + ending) for proto in protos(ROOT) for ending in ENDINGS}
    packages = {proto.parts[0] for proto in protos(ROOT)}
    committed = {
        path.relative_to(ROOT) for package in packages for path in (ROOT / package).rglob("*_pb2*.py*")
    }
    assert {path for path in committed if "__pycache__" not in path.parts} == expected
