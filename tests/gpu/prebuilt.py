"""A step on the kernels of an installed wheel that brings its cubins: nothing may be compiled. Run by hand on a GPU:

CP_GDN_PREBUILD=1 pip wheel --no-deps -w wheels . && pip install --target here wheels/*.whl
cd / && PYTHONPATH=here HOME=$(mktemp -d) python .../tests/gpu/prebuilt.py
"""

import time
from pathlib import Path

import torch

import cp_gdn
from cp_gdn.backends import cubins


def main() -> None:
    package = Path(cp_gdn.__file__).parent
    prebuilt = [*(package / "cubins").glob("*.cubin")]
    assert len(prebuilt) == len(cubins.VARIANTS), f"{len(prebuilt)} cubins in {package}"
    start = time.perf_counter()
    ctx = cp_gdn.build_context(
        cp_gdn.partition([0, 300, 1000], 1, "contiguous"),
        cp_gdn.Comm.alone(),
        device="cuda",
        heads=(2, 4),
        backend="hopper",
    )
    loaded = time.perf_counter() - start
    q, k = (
        torch.nn.functional.normalize(torch.randn(1000, 2, 128, device="cuda"), dim=-1).bfloat16() for _ in range(2)
    )
    v, gates = torch.randn(1000, 4, 128, device="cuda").bfloat16(), torch.rand(2, 1000, 4, device="cuda")
    leaves = [t.requires_grad_() for t in (q, k, v, -gates[0], gates[1])]
    o, _ = cp_gdn.chunk_gated_delta_rule(*leaves, ctx=ctx)
    o.sum().backward()
    assert all(bool(t.grad.isfinite().all()) for t in leaves)
    assert not [*cubins.default_cache().rglob("*.cubin")], "something was compiled"
    print(f"{len(prebuilt)} prebuilt kernels; the first context took {loaded:.2f} s, nothing was compiled")


if __name__ == "__main__":
    main()
