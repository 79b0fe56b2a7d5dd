"""Public names whose work comes with the memory modes; until then they say so instead of pretending."""


class Workspace:
    """Caller-held memory for calls. Not there yet: calls allocate their own and free it."""

    def __init__(self, *_: object, **__: object) -> None:
        raise NotImplementedError(
            "cp_gdn.Workspace is not there yet; leave workspace=None, calls allocate their own memory"
        )


class RecomputeHandle:
    """What a checkpoint's original forward hands to its recompute. Not there yet: a recompute exchanges again."""

    def __init__(self, *_: object, **__: object) -> None:
        raise NotImplementedError(
            "cp_gdn.RecomputeHandle is not there yet; without it a recompute runs the exchange again"
        )
