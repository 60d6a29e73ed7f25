from pathlib import Path

import pytest

from scripts.protos import generate, protos

ROOT = Path(__file__).resolve().parents[2]
ENDINGS = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("generated")
    generate(ROOT, out)
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
