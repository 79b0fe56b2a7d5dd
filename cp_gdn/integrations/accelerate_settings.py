"""What a user may choose under Accelerate: by argument, else by a CP_GDN_* variable, else by default. Read once."""

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from cp_gdn.integrations.attention import KINDS
from cp_gdn.options import Options

log = logging.getLogger("cp_gdn")

LAYOUTS = ("auto", "zigzag", "zigzag_per_document", "contiguous")
LOG_VARIABLE = "CP_GDN_LOG"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Choices for one accelerator; nothing here is read again after `resolve`.

    Attributes:
        layout: of a batch. "auto" is zigzag for rows [B, S] (each row apart) and zigzag_per_document for packed rows.
        attention: of the softmax layers: "auto", "gather" or "torch".
        on_one_rank: run cp_gdn's layers and kernels where cp_size is 1 too, instead of nothing.
        segments, exchange, backend, options: as in `build_context`. Accelerate's cp_comm_strategy is about keys and
            values of softmax attention and has nothing to do with ``exchange``.
        timeout: seconds that a rank may keep another one waiting; as long as torch's own, for ranks that save a
            checkpoint or sample text while the others go on to the next batch.
    """

    layout: str = "auto"
    attention: str = "auto"
    on_one_rank: bool = False
    segments: Any = "auto"
    exchange: str = "auto"
    backend: str = "auto"
    options: Options = field(default_factory=Options)
    timeout: float = 600.0

    def __post_init__(self) -> None:
        for name, value, values in (("layout", self.layout, LAYOUTS), ("attention", self.attention, KINDS)):
            if value not in values:
                raise ValueError(f"cp_gdn: {name}: got {value!r}, expected one of {', '.join(values)}")
        if not isinstance(self.options, Options):
            raise TypeError(f"cp_gdn: options: got {type(self.options).__name__}, expected cp_gdn.Options")

    @property
    def build(self) -> dict[str, Any]:
        """What the seats of taken-over models hand to `build_context`."""
        names = ("on_one_rank", "segments", "exchange", "backend", "options")
        return {name: getattr(self, name) for name in names}

    def described(self) -> dict[str, str]:
        """Every value as text, for the log and for the agreement of the ranks."""
        return {f.name: str(getattr(self, f.name)) for f in fields(self)}


def resolve(given: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[Settings, str]:
    """The settings of these arguments (None: not given) and this environment, and a line that says where from."""
    unknown = sorted(set(given) - {f.name for f in fields(Settings)})
    if unknown:
        known = ", ".join(f.name for f in fields(Settings))
        raise TypeError(f"cp_gdn: got unknown option {', '.join(unknown)}, expected some of {known}")
    by_argument = {name: value for name, value in given.items() if value is not None}
    by_variable = {}
    for name, (variable, parse) in _VARIABLES.items():
        if variable in environ and name not in by_argument:
            by_variable[name] = _parsed(variable, environ[variable], parse)
    settings = Settings(**by_argument, **by_variable)
    sources = dict.fromkeys(by_argument, "argument") | {name: _VARIABLES[name][0] for name in by_variable}
    texts = (
        f"{name}={text} ({sources[name]})" if name in sources else f"{name}={text}"
        for name, text in settings.described().items()
    )
    return settings, ", ".join(texts)


def set_log_level(environ: Mapping[str, str]) -> None:
    """Let CP_GDN_LOG=info (debug, warning, ..) show cp_gdn's log on stderr if nobody else shows it."""
    name = environ.get(LOG_VARIABLE)
    if name is None:
        return
    level = logging.getLevelName(name.upper())
    if not isinstance(level, int):
        raise ValueError(f"cp_gdn: {LOG_VARIABLE}: got {name!r}, expected debug, info, warning or error")
    log.setLevel(level)
    if not log.hasHandlers():
        log.addHandler(logging.StreamHandler(sys.stderr))


def _parsed(variable: str, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"cp_gdn: {variable}: got {text!r}; {error}") from None


def _segments(text: str) -> Any:
    """A rule's name, "grid:N", one P, or the P of each rank with commas."""
    numbers = text.split(",")
    if not all(number.strip().isdigit() for number in numbers):
        return text
    return [int(number) for number in numbers] if len(numbers) > 1 else int(text)


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("expected 0 or 1")
    return text == "1"


_OPTION_NAMES = tuple(f.name for f in fields(Options))


def _options(text: str) -> Options:
    """`save_transfer=0,decay_cutoff=none`: fields of `cp_gdn.Options`, 0 or 1 for flags."""
    given: dict[str, Any] = {}
    for pair in text.split(","):
        name, _, value = pair.strip().partition("=")
        if name == "decay_cutoff":
            given[name] = {"none": None, "default": "default"}[value] if value in ("none", "default") else float(value)
        elif name in _OPTION_NAMES:
            given[name] = {"0": False, "1": True}.get(value, value)
        else:
            raise ValueError(
                f"{pair.strip()!r} is none of {', '.join(_OPTION_NAMES)}, each =VALUE, with 0 or 1 for flags"
            )
    return Options(**given)


_VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "layout": ("CP_GDN_LAYOUT", str),
    "attention": ("CP_GDN_ATTENTION", str),
    "on_one_rank": ("CP_GDN_ON_ONE_RANK", _flag),
    "segments": ("CP_GDN_SEGMENTS", _segments),
    "exchange": ("CP_GDN_EXCHANGE", str),
    "backend": ("CP_GDN_BACKEND", str),
    "options": ("CP_GDN_OPTIONS", _options),
    "timeout": ("CP_GDN_TIMEOUT", float),
}
