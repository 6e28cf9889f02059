"""What counting without hardware takes for granted of CUDA, asked of a build for CUDA."""

from __future__ import annotations

import pytest
import torch

from dpbench.instruments.logical.rules import FUSED_ON_CUDA

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("alone_on_the_gpu")]


def test_what_is_made_of_others_but_has_a_kernel_of_its_own_is_counted_in_one_piece() -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [
        name.removesuffix(".default").replace("::", ".")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and has_kernel(name, "CompositeImplicitAutograd")
        and has_kernel(name, "CUDA")
    ]
    assert {*names} <= {*FUSED_ON_CUDA}
