"""`python -m cp_gdn.run train.py ..`: run a script whose accelerators are enabled, without a change to it.

Under `accelerate launch` or torchrun, for scripts that call `accelerator.maybe_context_parallel` and for `Trainer`.
Options come from CP_GDN_* variables.
"""

import functools
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

USAGE = """usage: python -m cp_gdn.run SCRIPT [ARGUMENT ..]
       python -m cp_gdn.run -m MODULE [ARGUMENT ..]

Runs SCRIPT (or MODULE) as python does, with cp_gdn enabled on every Accelerator that prepares a model.
Options: CP_GDN_LAYOUT, CP_GDN_ATTENTION, CP_GDN_ON_ONE_RANK, CP_GDN_SEGMENTS, CP_GDN_EXCHANGE, CP_GDN_BACKEND,
CP_GDN_OPTIONS, CP_GDN_TIMEOUT, CP_GDN_LOG.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments name; 2 if they name nothing."""
    argv = list(sys.argv[1:] if argv is None else argv)
    is_module = argv[:1] == ["-m"]
    target = argv[is_module:]
    if not target or target[0].startswith("-"):
        print(USAGE, end="", file=sys.stdout if argv in (["-h"], ["--help"]) else sys.stderr)
        return 0 if argv in (["-h"], ["--help"]) else 2
    enable_all()
    sys.argv = target
    if is_module:
        runpy.run_module(target[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(target[0]))
        runpy.run_path(target[0], run_name="__main__")
    return 0


def enable_all() -> None:
    """Let every Accelerator of this process enable itself when it prepares a model, unless somebody has enabled it."""
    from accelerate import Accelerator
    from torch import nn

    from cp_gdn.integrations.accelerate import enable, plugin_of

    original = Accelerator.prepare

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **options: Any) -> Any:
        if plugin_of(self) is None and any(isinstance(arg, nn.Module) for arg in args):
            enable(self)
            if "prepare" in self.__dict__:  # on one rank `enable` replaces this method
                return self.prepare(*args, **options)
        return original(self, *args, **options)

    Accelerator.prepare = prepare


if __name__ == "__main__":
    sys.exit(main())
