"""What a compiler makes of every kernel that is shipped, for both architectures, without a GPU."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton package is for Linux only")

from pallas_kernels import shapes, tuning
from pallas_kernels.compile import KERNELS, Result, compile_all, configurations, main
from pallas_kernels.offline import ARCHITECTURES, lower
from pallas_kernels.paged_decode import segment_tiles

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
ATTENTION = ("ragged_paged_attention", "paged_decode")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def results(request: pytest.FixtureRequest) -> list[Result]:
    return compile_all([request.param])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_everything_lowers(arch: str) -> None:
    """To Triton IR, one kernel each, and `reduce_segments` behind what is split."""
    for configuration in configurations(arch):
        first, *others = lower(configuration.call, configuration.arguments, arch=arch)
        assert first.name == configuration.kernel
        assert first.num_warps == configuration.tiles.num_warps
        is_split = getattr(configuration.tiles, "segments", 1) > 1
        assert [kernel.name for kernel in others] == ["reduce_segments"] * is_split


@pytest.mark.slow
def test_nothing_spills_and_all_fits(results: list[Result]) -> None:
    for result in results:
        compiled = result.compiled
        assert compiled.stack_bytes == 0, result
        assert compiled.registers <= 255, result
        assert compiled.shared_bytes <= ARCHITECTURES[result.arch].shared_bytes, result
        assert compiled.programs_per_sm >= 1, result


@pytest.mark.slow
def test_keys_and_values_are_buffered(results: list[Result]) -> None:
    """Each loop over the context has its keys and its values in two or more buffers."""
    for result in results:
        if result.kernel in ATTENTION:
            loops = len(result.compiled.dots) // 2
            assert len(result.compiled.buffers) >= 2 * loops, result
            assert min(result.compiled.buffers) >= 2, result


@pytest.mark.slow
def test_tensor_cores_take_every_product(results: list[Result]) -> None:
    for result in results:
        dots, opcodes = set(result.compiled.dots), result.compiled.opcodes
        is_hopper = result.arch == "sm_90"
        if result.kernel == "ragged_paged_attention":
            assert dots == {"wgmma" if is_hopper else "mma"}, result
            assert opcodes == ("HGMMA" if is_hopper else "HMMA",), result
        elif result.kernel == "paged_decode":  # 16 rows: a warp group would want 64
            assert (dots, opcodes) == ({"mma"}, ("HMMA",)), result
        elif result.kernel == "quant_matmul":
            is_many = result.tiles.rows > 16
            is_int8 = result.label.startswith("W8A8")
            warp_groups = is_hopper and is_many and not result.label.startswith("FP8A8")  # ADR 10
            assert dots == {"wgmma" if warp_groups else "mma"}, result
            assert opcodes == (("I" if is_int8 else "H") + ("GMMA" if warp_groups else "MMA"),), result
        else:
            assert not dots, result


@pytest.mark.slow
def test_everything_is_there(results: list[Result]) -> None:
    """Each kernel, each kind of model, each type of cache, each kind of weights."""
    arch = results[0].arch
    assert {r.kernel for r in results} == {*KERNELS, "reduce_segments"}
    for kernel in ATTENTION:
        labels = {r.label.split(" 64 x")[0].split(" 1 x")[0] for r in results if r.kernel == kernel}
        assert len(labels) == len(list(shapes.attention_kinds())) * len(shapes.cache_dtypes(arch))
    assert len([r for r in results if r.kernel == "quant_matmul"]) == 2 * len(shapes.weight_kinds(arch))


@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--arch", "sm_90", "--kernel", "kv_cache_write"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| arch | kernel |")
    assert len({line.count("|") for line in lines}) == 1
    assert all(re.match(r"\| sm_90 \| kv_cache_write \| .*bfloat16|.*int8|.*float8", line) for line in lines[2:])


@pytest.mark.parametrize("name", shapes.MODELS)
@pytest.mark.parametrize(("sequences", "context"), shapes.DECODES)
def test_decoding_moves_no_more_than_it_must(name: str, sequences: int, context: int) -> None:
    """By the kernel's own ranges, with its masks on both ends (`test_pallas_attention` counts what these let through).

    Every segment also asks for its block table, and for that of the tile after its last one.
    """
    model = shapes.MODELS[name]
    tiles = tuning.decode_tiles("sm_90", model.head_dim, "bfloat16", sequences, model.kv_heads, context)
    oldest = 0 if model.window is None else max(0, context - model.window)
    segment = jnp.arange(tiles.segments)
    begin, end = map(np.asarray, segment_tiles(jnp.int32(oldest), jnp.int32(context), segment, tiles))
    first, last = np.maximum(begin * tiles.tokens, oldest), np.minimum(end * tiles.tokens, context)
    tokens = np.maximum(last - first, 0).sum()
    looked_up = (np.maximum(end - begin, 0) + 1).sum() * tiles.tokens // shapes.BLOCK_SIZE
    moved = sequences * model.kv_heads * (4 * tokens * model.head_dim + 4 * looked_up)
    floor = shapes.decode_bytes(model, "bfloat16", [context] * sequences)
    assert floor <= moved <= 1.05 * floor


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("sequences", [1, 2, 8, 17, 64, 256])
@pytest.mark.parametrize("kv_heads", [1, 4, 8, 32])
def test_segments_fill_the_chip(arch: str, sequences: int, kv_heads: int) -> None:
    """Once, where contexts are long enough, and never more than twice; and not at all where there is no need."""
    programs = sequences * kv_heads
    segments = tuning.decode_tiles(arch, 128, "bfloat16", sequences, kv_heads, 131_072).segments
    num_sms = ARCHITECTURES[arch].num_sms
    assert tuning.NUM_SMS[arch] == num_sms
    assert programs * segments >= num_sms
    assert segments == 1 or programs * segments < 2 * num_sms
    short = tuning.decode_tiles(arch, 128, "bfloat16", sequences, kv_heads, 128)
    assert short.segments <= 2  # no more than there are tiles
