"""What kernels in Gluon call where others call `overlap.py`, which has the rules: Gluon cannot call plain Triton."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def let_next_start(PDL: gl.constexpr):
    """As in overlap.py."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def wait_for_previous(PDL: gl.constexpr):
    """As in overlap.py."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)
