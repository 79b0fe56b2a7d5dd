"""Import cp_gdn with the optional packages blocked: any attempt of ours to import one of them is an error."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

BLOCKED = ("accelerate", "transformers", "triton", "cuda")


class Blocker(importlib.abc.MetaPathFinder):
    """Refuses the blocked packages; notes the attempts that come from cp_gdn itself, caught or not."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.attempts: list[str] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in BLOCKED:
            return None
        frames = [frame for frame in traceback.extract_stack()[:-1] if "importlib" not in frame.filename]
        if frames[-1].filename.startswith(self.folder):
            self.attempts.append(f"{fullname} by {frames[-1].filename}:{frames[-1].lineno}")
        raise ModuleNotFoundError(f"{fullname} is blocked in this check", name=fullname)


def main() -> int:
    spec = importlib.util.find_spec("cp_gdn")
    if spec is None or not spec.submodule_search_locations:
        print("check_import: cp_gdn is not installed", file=sys.stderr)
        return 1
    blocker = Blocker(spec.submodule_search_locations[0])
    sys.meta_path.insert(0, blocker)
    import cp_gdn

    loaded = sorted(name for name in sys.modules if name.split(".")[0] in BLOCKED)
    if blocker.attempts or loaded:
        print(f"check_import: cp_gdn tried to import {blocker.attempts}; loaded: {loaded}", file=sys.stderr)
        return 1
    missing = [name for name in cp_gdn.__all__ if not hasattr(cp_gdn, name)]
    if missing:
        print(f"check_import: names of __all__ that are missing: {missing}", file=sys.stderr)
        return 1
    print(f"check_import: {cp_gdn.__file__}, {len(cp_gdn.__all__)} public names, none of {BLOCKED} needed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
