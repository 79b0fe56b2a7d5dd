"""What `cp-gdn doctor` prints: plain text, so that it runs where nothing else does, or JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cp_gdn.cli.doctor_facts import Facts
from cp_gdn.cli.doctor_model import Kind
from cp_gdn.cli.doctor_traps import STOPS, Finding


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """The backend that layers of one shape take here, and why."""

    heads: tuple[int, int]
    head_dims: tuple[int, int]
    dtype: str
    device: str
    backend: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """model: name and type of the model, empty without one, and its kinds of layers."""

    facts: Facts
    backends: tuple[Taken, ...]
    model: tuple[str, str]
    kinds: tuple[Kind, ...]
    findings: tuple[Finding, ...]

    @property
    def stops(self) -> int:
        return sum(finding.level == STOPS for finding in self.findings)


def as_json(report: Report) -> str:
    facts = asdict(report.facts)
    compiler = {"found": facts.pop("has_compiler"), "text": facts.pop("compiler")}
    ready, wanted = facts.pop("cached")
    cache = {"folder": facts.pop("cache"), "ready": ready, "kernels": wanted}
    name, model_type = report.model
    model = {"name": name, "type": model_type, "layers": [asdict(kind) for kind in report.kinds]} if name else None
    printed: dict[str, Any] = {
        "ok": report.stops == 0,
        **facts,
        "compiler": compiler,
        "cache": cache,
        "backends": [asdict(taken) for taken in report.backends],
        "model": model,
        "findings": [asdict(finding) for finding in report.findings],
    }
    return json.dumps(printed, indent=2)


def as_text(report: Report) -> str:
    parts = (_machine(report.facts), _backends(report.backends), _model(report), _findings(report))
    return "\n\n".join("\n".join(part) for part in (list(each) for each in parts) if part)


def _machine(facts: Facts) -> Iterator[str]:
    yield "versions     " + ", ".join(f"{name} {version}" for name, version in facts.versions.items() if version)
    missing = [name for name, version in facts.versions.items() if not version]
    if missing:
        yield f"             not there: {', '.join(missing)}"
    if not facts.gpus:
        yield "GPUs         torch sees none"
    for number, gpu in enumerate(facts.gpus):
        yield f"GPU {number}        {gpu.name}, sm_{gpu.capability[0]}{gpu.capability[1]}, {gpu.memory_gib:.0f} GiB"
    if facts.links:
        yield "links        " + ", ".join(_link(facts.links))
    yield f"compiler     {facts.compiler}"
    yield f"kernel cache {facts.cache}: {facts.cached[0]} of {facts.cached[1]} kernels ready"
    settings = [f"{name}={value}" for name, value in facts.environment.items()]
    yield f"environment  {' '.join(settings) or 'nothing set that torch, NCCL, gloo or cp_gdn read'}"


def _link(links: Sequence[Any]) -> Iterator[str]:
    """How many pairs have each kind of link."""
    names = [link.name or ("peer access" if link.peer else "through the host") for link in links]
    for name in dict.fromkeys(names):
        yield f"{names.count(name)} x {name}"


def _backends(backends: Sequence[Taken]) -> Iterator[str]:
    yield "heads     head dims  dtype     device  backend  why"
    for t in backends:
        heads, dims = (",".join(map(str, pair)) for pair in (t.heads, t.head_dims))
        yield f"{heads:9} {dims:10} {t.dtype:9} {t.device:7} {t.backend:8} {t.reason}"


def _model(report: Report) -> Iterator[str]:
    name, model_type = report.model
    if name:
        yield f"model {name} ({model_type}) under cp_size > 1"
    for kind in report.kinds:
        shape = ""
        if kind.shape is not None:
            shape = f"; heads {kind.shape.heads}, head dims {kind.shape.head_dims}, convolution {kind.shape.conv}"
        yield f"  {kind.layers or '':3} {kind.kind}: {kind.happens}{shape}"


def _findings(report: Report) -> Iterator[str]:
    for finding in report.findings:
        yield f"{finding.level.upper()}  {finding.name}: {finding.what}"
        yield f"       way out: {finding.way_out}"
    yield f"{report.stops} of {len(report.findings)} findings would stop a run" if report.findings else "nothing found"
