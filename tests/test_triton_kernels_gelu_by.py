"""What layers are told beside the stream: gelu(gate) times numbers that lie elsewhere, of all tokens and of some; rows
of a table, for tokens of images, too. Bad input, other cards."""

from collections.abc import Callable

import pytest
import torch

from interpreted import rerun_interpreted
from places import PLACES, Place
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.dispatch import INTERPRETED
from tercet.triton_kernels.gelu_by import gelu_by
from tercet.triton_kernels.image_rows import IMAGE_IDS
from tercet.triton_kernels.scaled_embedding import scaled_embedding


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    return Place.of(request)


@pytest.mark.parametrize(("size", "count", "layer"), [(12, 3, 0), (12, 3, 2), (256, 5, 4), (1, 1, 0)])
def test_of_all_tokens_and_of_some(place: Place, size: int, count: int, layer: int) -> None:
    gate, by, rows = place.random(7, size) * 3, place.random(7, size * count), [6, 0, 3]
    own = by[:, layer * size : (layer + 1) * size].double()
    wanted = torch.nn.functional.gelu(gate.double(), approximate="tanh") * own
    place.check_rounded(gelu_by(gate.clone(), by, layer * size), wanted)
    wanted = torch.nn.functional.gelu(gate[:3].double(), approximate="tanh") * own[rows]
    some = gate[:3].clone()
    assert gelu_by(some, by, layer * size, place.ints(rows)) is some
    place.check_rounded(some, wanted)


@pytest.mark.parametrize("start", [0, 700])
def test_rows_of_a_table_where_images_are(place: Place, start: int) -> None:
    table, ids = place.random(9, 72), place.ints([IMAGE_IDS, start + 2, 2**31 - 1])
    wanted = table.double()[[3, 2, 3]] * 1.7
    place.check_rounded(scaled_embedding(ids, table, start, 1.7, start + 3), wanted)
    wanted[[0, 2]] = 0.0
    place.check_rounded(scaled_embedding(ids, table, start, 1.7), wanted)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: gelu_by(torch.zeros(2, 4), torch.zeros(3, 8), 0), r"by: got shape \[3, 8\], wanted \[2, \*\]"),
        (lambda: gelu_by(torch.zeros(2, 4), torch.zeros(2, 8), 5), "first: got 5, wanted 0 to 4"),
        (lambda: gelu_by(torch.zeros(2, 4), torch.zeros(2, 8), 0, torch.zeros(2)), "rows: got torch.float32"),
        (lambda: gelu_by(torch.zeros(2, 4), torch.zeros(2, 8).half(), 0), "by: got torch.float16"),
    ],
)
def test_bad_input(run: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run()


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("capability", [89, 90])
def test_compile(capability: int) -> None:
    """Once for all layers."""

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    with compiling_for(capability) as kernels:
        for layer in range(3):
            gelu_by(meta(7, 256), meta(7, 256 * 35), 256 * layer)
        gelu_by(meta(7, 256), meta(90, 256 * 35), 512, meta(7, dtype=torch.int32))
    assert len({kernel.hash for kernel in kernels}) == 2
    assert all(("griddepcontrol.wait" in kernel.asm["ptx"]) == (capability == 90) for kernel in kernels)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter's own tests")
def test_interpreted() -> None:
    rerun_interpreted(__file__)
