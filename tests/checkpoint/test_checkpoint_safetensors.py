"""Folders with safetensors: opened, read without mapping the file, and refused with file and remedy named."""

import json
import shutil
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from pagedjax.checkpoint import open_checkpoint, source
from pagedjax.checkpoint.tensor_file import read_header, write_tensors
from pagedjax.config import UserError

CONFIG = {"model_type": "llama", "rope_parameters": {"rope_theta": 1e4}, "unknown": [1, None]}
TENSORS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.weight": np.linspace(-3, 3, 10).astype(ml_dtypes.bfloat16).reshape(2, 5),
    "c.scalar": np.array(5, np.int64),
    "d.half": np.ones((2, 1, 3), np.float16),
    "e.empty": np.zeros((0, 4), np.float32),
}


def model_folder(path: Path, tensors: dict[str, np.ndarray] | None = None) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    if tensors is not None:
        save_file(tensors, path / "model.safetensors")
    return path


def sharded_folder(path: Path) -> Path:
    model_folder(path)
    shards = {f"model-0000{n}-of-00002.safetensors": dict(list(TENSORS.items())[n - 1 :: 2]) for n in (1, 2)}
    for file, tensors in shards.items():
        save_file(tensors, path / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def refused(folder: Path | str, match: str, **options: Any) -> None:
    with pytest.raises(UserError, match=match) as caught:
        open_checkpoint(str(folder), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_folder_gives_its_config_and_every_tensor(sharded: bool, tmp_path: Path) -> None:
    folder = sharded_folder(tmp_path / "m") if sharded else model_folder(tmp_path / "m", TENSORS)
    opened = open_checkpoint(str(folder))
    assert (opened.name, opened.config, opened.generation_config, opened.is_dummy) == ("m", CONFIG, {}, False)
    assert opened.tokenizer_dir is None
    assert opened.names() == TENSORS.keys()
    assert opened.shapes() == {name: values.shape for name, values in TENSORS.items()}
    for name, values in TENSORS.items():
        read = opened.read(name)
        assert read.dtype == values.dtype
        assert read.tobytes() == values.tobytes()
    with pytest.raises(KeyError):
        opened.read("no.such")


def test_reading_maps_nothing_and_gives_memory_of_its_own(tmp_path: Path) -> None:
    opened = open_checkpoint(str(model_folder(tmp_path / "m", TENSORS)))
    first = opened.read("a.weight")
    first[:] = 0
    np.testing.assert_array_equal(opened.read("a.weight"), TENSORS["a.weight"])
    assert "model.safetensors" not in Path("/proc/self/maps").read_text()


def test_generation_config_and_tokenizer_are_found_and_can_be_replaced(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", TENSORS)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (folder / "tokenizer.json").write_text("{}")
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    opened = open_checkpoint(str(folder))
    assert opened.generation_config == {"eos_token_id": [1, 2]}
    assert opened.tokenizer_dir == folder
    assert open_checkpoint(str(folder), tokenizer=str(other)).tokenizer_dir == other
    assert open_checkpoint(str(folder), tokenizer=str(other / "tokenizer.json")).tokenizer_dir == other
    (tmp_path / "bare").mkdir()
    refused(folder, "bare holds no tokenizer", tokenizer=str(tmp_path / "bare"))
    refused(folder, "nowhere", tokenizer=str(tmp_path / "nowhere"))


def test_a_dummy_needs_only_the_config(tmp_path: Path) -> None:
    opened = open_checkpoint(str(model_folder(tmp_path / "m")), "dummy")
    assert opened.is_dummy
    assert opened.names() == frozenset()
    assert opened.config == CONFIG


def test_a_truncated_file_is_refused_at_any_length(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", TENSORS)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for length in range(0, len(whole), 3):
        file.write_bytes(whole[:length])
        refused(folder, r"model\.safetensors is truncated or damaged .* again")
    file.write_bytes(whole + b"x")
    refused(folder, "truncated or damaged")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_never_gives_anything_but_a_user_error(data: st.DataObject, tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    save_file(TENSORS, file)
    whole = bytearray(file.read_bytes())
    (header_bytes,) = struct.unpack("<Q", whole[:8])
    whole[data.draw(st.integers(0, 7 + header_bytes))] = data.draw(st.integers(0, 255))
    file.write_bytes(whole)
    with suppress(UserError):
        tensors = read_header(file)
        assert all(tensor.start + tensor.nbytes <= len(whole) for tensor in tensors.values())


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": {"dtype": 7, "shape": [1], "data_offsets": [0, 4]}},
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        },
    ],
)
def test_a_header_that_does_not_fit_the_data_is_refused(header: Any, tmp_path: Path) -> None:
    raw = json.dumps(header).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(8))
    with pytest.raises(UserError, match=r"m\.safetensors is truncated or damaged"):
        read_header(tmp_path / "m.safetensors")


def test_fp8_and_quantised_checkpoints_are_refused_with_the_remedy(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    raw = json.dumps({"a": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(4))
    refused(folder, r"model\.safetensors: tensor 'a' is stored as F8_E4M3.*bfloat16")
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    refused(folder, "awq.*unquantised")


def test_a_missing_or_incomplete_shard_is_named(tmp_path: Path) -> None:
    folder = sharded_folder(tmp_path / "m")
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"]["z.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(listed))
    refused(folder, r"model-00001-of-00002\.safetensors lacks tensor 'z\.weight'")
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, r"model-00002-of-00002\.safetensors is missing")
    index.unlink()
    (folder / "model-00003-of-00003.safetensors").write_bytes(b"")
    refused(folder, "no model.safetensors.index.json; download the index")


def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "secret.safetensors")
    folder = model_folder(tmp_path / "m")
    for file in ("../secret.safetensors", str(tmp_path / "secret.safetensors")):
        index = {"weight_map": {"a.weight": file}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        refused(folder, "not a file of this folder")


def test_pickles_adapters_and_empty_folders_are_refused_with_the_reason(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    refused(folder, "no safetensors files")
    for name in ("pytorch_model.bin", "a.pt", "a.pth"):
        (folder / name).write_bytes(b"")
        refused(folder, "pickle runs whatever code.*convert it to safetensors")
        (folder / name).unlink()
    save_file(TENSORS, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    refused(folder, "adapter.*merge")
    shutil.rmtree(folder)
    folder.mkdir()
    refused(folder, r"config\.json is missing")
    (folder / "config.json").write_text("{")
    refused(folder, r"config\.json is no JSON")
    (folder / "config.json").write_text("[]")
    refused(folder, r"config\.json is no JSON object")


def test_the_name_of_hugging_face_wins_over_the_publishers_own_layout(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", TENSORS)
    save_file({"tok_embeddings.weight": TENSORS["a.weight"]}, folder / "consolidated.safetensors")
    assert open_checkpoint(str(folder)).names() == TENSORS.keys()


def test_a_file_that_shrinks_or_goes_after_opening_is_an_error_of_the_user(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", TENSORS)
    opened = open_checkpoint(str(folder))
    file = folder / "model.safetensors"
    last = max(opened.names(), key=lambda name: opened.tensors[name].start if opened.tensors[name].nbytes else 0)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="ended while it was being read"):
        opened.read(last)
    file.unlink()
    with pytest.raises(UserError, match="cannot read"):
        opened.read(last)


def test_what_is_written_is_what_the_reference_library_reads(tmp_path: Path) -> None:
    layout = {
        name: ({"float32": "F32", "bfloat16": "BF16"}[values.dtype.name], values.shape)
        for name, values in TENSORS.items()
        if name[0] in "abe"
    }
    pieces = [TENSORS["a.weight"][:1], TENSORS["a.weight"][1:], TENSORS["b.weight"], TENSORS["e.empty"]]
    file = tmp_path / "m.safetensors"
    write_tensors(file, layout, pieces)
    read = load_file(file)
    assert read.keys() == layout.keys()
    for name, values in read.items():
        assert values.tobytes() == TENSORS[name].tobytes()
    with pytest.raises(ValueError, match="bytes written"):
        write_tensors(file, layout, pieces[1:])


def test_a_hub_id_downloads_only_what_is_safe_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "m", TENSORS)
    asked: dict[str, dict[str, list[str]]] = {}

    def download(model: str, **patterns: list[str]) -> str:
        asked[model] = patterns
        return str(folder)

    monkeypatch.setattr(source, "snapshot_download", download)
    assert open_checkpoint("owner/name").name == "owner/name"
    assert "*.safetensors" in asked["owner/name"]["allow_patterns"]
    assert not [p for p in asked["owner/name"]["allow_patterns"] if p.endswith(("py", "bin", "pt", "pth", "*"))]
    assert open_checkpoint("owner/dummy", "dummy").is_dummy
    assert "*.safetensors" not in asked["owner/dummy"]["allow_patterns"]


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (LocalEntryNotFoundError("no\nlines"), "owner/name.*cannot be reached"),
        (HFValidationError("bad"), "owner/name.*check the name"),
        (ConnectionError("broken\npipe"), "cannot download owner/name: broken"),
        (TimeoutError(), "cannot download owner/name: TimeoutError"),
    ],
)
def test_a_hub_that_does_not_answer_is_one_line(error: Exception, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(model: str, **patterns: list[str]) -> str:
        raise error

    monkeypatch.setattr(source, "snapshot_download", download)
    refused("owner/name", match)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "does not exist")
    refused("./nowhere", "does not exist")
    refused(tmp_path / "no.gguf", "does not exist")
    folder = model_folder(tmp_path / "m", TENSORS)
    refused(folder, "unknown load format 'zip'", load_format="zip")
    refused(folder, "orbax", load_format="orbax")
    refused(folder, "not a GGUF file", load_format="gguf")
    (folder / "config.json").unlink()
    for name in ("a.gguf", "b.gguf"):
        (folder / name).write_bytes(b"GGUF")
    refused(folder, "2 GGUF files; give the path of one")
    refused(folder / "a.gguf", "leave out --load-format safetensors", load_format="safetensors")
    refused(folder / "model.safetensors", "is no GGUF file")
