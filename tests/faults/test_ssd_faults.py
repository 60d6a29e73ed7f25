"""The SSD tier alone: each byte of a block's file flipped, and its process killed in the middle of writes.

`make test` takes a sample; `MOONPOOL_FAULTS=full` (`make test-faults`) all bytes of thousands of files and hundreds of
kills. A failing seed is the test's parameter: `pytest tests/faults/test_ssd_faults.py -k 'kill and 17'`.
"""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.blocks import BlockHash
from kvstore.tiers.block_file import FileForm
from kvstore.tiers.ssd import Loaded, Missed, SsdTier
from tests.faults.ssd_writer import FORM, bytes_of, sums_of

FULL = os.environ.get("MOONPOOL_FAULTS") == "full"
EACH_BYTE = 1 if FULL else 32
KILLS = range(200 if FULL else 6)
FORMS = {
    "aligned": FileForm("0123456789abcdef", layers=2, segment_bytes=2048),
    "odd": FileForm("0123456789abcdef", layers=3, segment_bytes=100),
}


def flip(path: Path, place: int, mask: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        [byte] = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ mask]))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
async def test_each_byte_of_a_file_flipped_is_a_miss(tmp_path: Path, form: FileForm) -> None:
    """A block of its own for each byte: header, payload, and what fills their last pages. The seed is the byte."""
    tier = SsdTier.open(tmp_path, form)
    buffer = np.empty((form.layers, form.segment_bytes), np.uint8)
    flipped = range(0, form.file_bytes, EACH_BYTE)
    for place in flipped:
        random_bytes = np.random.default_rng(place)
        name = BlockHash(random_bytes.bytes(32))
        content = random_bytes.integers(0, 256, buffer.shape, np.uint8)
        await tier.write(name, content, sums_of(content, name))
        assert isinstance(await tier.read(name, buffer), Loaded)
        np.testing.assert_array_equal(buffer, content)
        path = tmp_path / form.name / name.hex()[:2] / name.hex()
        flip(path, place, 1 << int(random_bytes.integers(8)))
        result = await tier.read(name, buffer)
        assert isinstance(result, Missed) and result.corrupt, f"byte {place} of block {place}"
        assert not path.exists()
    assert tier.counters.corrupt == len(flipped)
    assert tier.used_bytes == 0
    await tier.close()


def killed(folder: Path, seed: int) -> None:
    """A process that writes, killed at a moment that the seed names; a third of them leave an unfinished file."""
    script = Path(__file__).with_name("ssd_writer.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, str(script), str(folder), str(seed)], stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(random.Random(seed).uniform(0.0, 0.15))
        process.kill()


@pytest.mark.parametrize("seed", KILLS)
async def test_a_kill_leaves_nothing_torn_and_nothing_behind(tmp_path: Path, seed: int) -> None:
    killed(tmp_path, seed)
    files = sorted(path.name for path in (tmp_path / FORM.name).rglob("*") if path.is_file())
    tier = SsdTier.open(tmp_path, FORM)
    assert not list((tmp_path / "unfinished").iterdir())
    found = [name async for names in tier.scan() for name in names]
    assert sorted(name.hex() for name in found) == files, "each file is a block, under its own name"
    buffer = np.empty((FORM.layers, FORM.segment_bytes), np.uint8)
    for name in found:
        assert isinstance(await tier.read(name, buffer), Loaded)
        np.testing.assert_array_equal(buffer, bytes_of(name))
    assert tier.counters.corrupt == 0, "a renamed file is a whole one"
    assert tier.used_bytes == len(files) * FORM.file_bytes
    await tier.close()
