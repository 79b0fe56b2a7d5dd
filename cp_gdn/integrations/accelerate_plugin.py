"""What `enable` puts on one accelerator: its two replaced methods, the models taken over, the batch that is sharded."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cp_gdn import lifesigns
from cp_gdn.comm import Comm
from cp_gdn.integrations.accelerate_batch import (
    PACKING,
    Shape,
    check_local,
    check_media,
    check_padding,
    read_shape,
    row_bounds,
)
from cp_gdn.integrations.accelerate_metrics import Metrics
from cp_gdn.integrations.accelerate_settings import Settings
from cp_gdn.integrations.attention import SharedAttention, install
from cp_gdn.integrations.pack import Pack
from cp_gdn.integrations.seat import Seat
from cp_gdn.integrations.transformers import Takeover, take_over

log = logging.getLogger("cp_gdn")

_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What layers compute in under Accelerate's mixed precision, whatever their weights are."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Taken:
    """A prepared model: what was taken over, the attention of its softmax layers, and how to undo the rest."""

    model: nn.Module
    takeover: Takeover
    attention: SharedAttention
    undo: tuple[Callable[[], None], ...]

    @property
    def seat(self) -> Seat:
        return self.takeover.seat


class Plugin:
    """The plugin of one accelerator. said: the settings as logged, each with where it came from."""

    def __init__(self, accelerator: Any, settings: Settings, said: str) -> None:
        self.settings, self.said = settings, said
        self._accelerator = accelerator
        self._prepare, self._context_parallel = accelerator._prepare_cp, accelerator.maybe_context_parallel
        self._prepare_all = accelerator.prepare
        self.metrics = Metrics(accelerator, self._last_pack)
        self._comm: Comm | None = None
        self._taken: list[Taken] = []
        self._step: ExitStack | None = None

    @property
    def comm(self) -> Comm:
        """The context-parallel group of this rank, made on all its ranks when the first model is prepared."""
        if self._comm is None and self.alone:
            self._comm = Comm.alone()
        elif self._comm is None:
            mesh = self._accelerator.torch_device_mesh["cp"]
            self._comm = Comm(mesh.get_group(), timeout=self.settings.timeout)
            lifesigns.start()
            self._comm.agree("cp_gdn.accelerate options", self.settings.described())
        return self._comm

    @property
    def alone(self) -> bool:
        """Whether sequences stay whole, and cp_gdn's layers run for their kernels' sake."""
        sizes = self._accelerator.parallelism_config
        return sizes is None or sizes.cp_size == 1

    @property
    def suspended(self) -> bool:
        """Whether models run on whole sequences now, inside `unsharded`."""
        return any(taken.seat.suspended for taken in self._taken)

    def prepare(self, *args: Any) -> tuple[Any, ...]:
        """In place of `_prepare_cp`: Accelerate's own for all but models, whose layers are taken over instead."""
        self._prepare(*(arg for arg in args if not isinstance(arg, nn.Module)))
        self._take_all(args)
        return args

    def prepare_alone(self, *args: Any, **options: Any) -> Any:
        """In place of `prepare` on one rank, where Accelerate does not call `_prepare_cp`."""
        self._take_all(args)
        return self._prepare_all(*args, **options)

    def _take_all(self, args: Sequence[Any]) -> None:
        for model in args:
            if isinstance(model, nn.Module) and all(model is not taken.model for taken in self._taken):
                if not self._taken and self._accelerator.is_main_process:
                    log.info("cp_gdn: options: %s", self.said)
                self._taken.append(self._take(model))

    def _take(self, model: nn.Module) -> Taken:
        _check_layer_types(model)
        takeover = take_over(model, self.comm, **self.settings.build)
        takeover.seat.dtype = _NARROW.get(self._accelerator.mixed_precision)
        try:
            attention, undo = install(model, takeover.attention, takeover.seat, self.settings.attention)
        except Exception:
            takeover.disable()
            raise
        restore = _wrap_layers_that_are_there(model)
        look = torch.compiler.disable(self._before_forward)
        hook = model.register_forward_pre_hook(look, with_kwargs=True)
        if self._accelerator.is_main_process:
            chosen = self.settings
            log.info(
                "cp_gdn: %d GDN + %d SDPA layers, cp=%d (%s), exchange=%s, backend=%s",
                len(takeover.layers),
                len(takeover.attention),
                self.comm.size,
                "zigzag" if chosen.layout == "auto" else chosen.layout,
                chosen.exchange,
                chosen.backend,
            )
        return Taken(model=model, takeover=takeover, attention=attention, undo=(undo, restore, hook.remove))

    def end(self) -> None:
        """Give models and the group back."""
        for taken in self._taken:
            for undo in taken.undo:
                undo()
            taken.takeover.disable()
        if self._comm is not None:
            self._comm.close()

    # ---- steps -------------------------------------------------------------------------------------------------------

    @contextmanager
    def context_parallel(
        self,
        buffers: list[Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> Iterator[None]:
        """In place of `maybe_context_parallel`: Accelerate's own, with the pack of these buffers on the layers' seats.

        Raises:
            ValueError: a length that cannot be cut, or a layout that Accelerate cannot cut.
        """
        if self.suspended:
            yield
            return
        dims = token_dims(buffers or [], buffer_seq_dims or [])
        for buffer in buffers or []:
            # Cut in place, in memory of their own: Trainer holds a view of the labels, which is to stay whole.
            buffer.data = buffer.data.clone()
        with ExitStack() as stack:
            if self._taken and buffers:
                stack.enter_context(self._hold(self._rows_of(buffers, dims), checked=False))
            stack.enter_context(
                self._context_parallel(
                    buffers=buffers, buffer_seq_dims=dims or buffer_seq_dims, no_restore_buffers=no_restore_buffers
                )
            )
            yield

    def _rows_of(self, buffers: Sequence[Tensor], dims: Sequence[int]) -> Pack:
        if self.settings.layout not in ("auto", "zigzag"):
            raise ValueError(
                f'cp_gdn: layout: got "{self.settings.layout}", but accelerator.maybe_context_parallel, which Trainer '
                'calls, always cuts zigzag; use layout="zigzag", or cp_gdn.accelerate.shard in a loop of your own'
            )
        length = buffers[0].shape[dims[0]]
        rows = max((x.shape[0] for x, dim in zip(buffers, dims, strict=True) if dim == 1), default=1)
        return self._seat().rows(rows, length, device=buffers[0].device)

    def pack_of(self, shape: Shape) -> Pack:
        """The pack of a whole batch in the layout that was asked for."""
        seat, layout = self._seat(), self.settings.layout
        if shape.bounds is not None:
            layout = "zigzag_per_document" if layout == "auto" else layout
            return seat.packed(shape.bounds, layout=layout, device=shape.device)
        if layout != "contiguous":
            return seat.rows(shape.rows, shape.length, device=shape.device)
        if shape.rows != 1:
            raise ValueError(f'cp_gdn: layout: got "contiguous" with {shape.rows} rows, expected one row, or zigzag')
        return seat.packed(shape.doc_bounds, layout=layout, device=shape.device)

    @contextmanager
    def step(self, pack: Pack) -> Iterator[None]:
        """A step of a batch that `shard` has cut by this pack."""
        inner: Any = nullcontext()
        if self._taken[0].attention.kind(pack) == "torch":
            rows = torch.empty(1, pack.partition.doc_bounds[1], dtype=torch.int8, device=pack.device)
            # Its buffers are cut already; torch wants one to see the length by.
            inner = self._context_parallel(buffers=[rows], buffer_seq_dims=[1], no_restore_buffers={rows})
        with self._hold(pack, checked=True), inner:
            yield

    @contextmanager
    def _hold(self, pack: Pack, *, checked: bool) -> Iterator[None]:
        """Keep the pack on every seat, and on the way out the one in use last: a backward may still recompute."""
        with ExitStack() as stack:
            for taken in self._taken:
                stack.enter_context(taken.seat.hold(pack))
            self._step = None if checked else stack
            try:
                yield
            finally:
                self._step, last = None, [taken.seat.pack for taken in self._taken]
        for taken, used in zip(self._taken, last, strict=True):
            taken.seat.pack = used

    def _before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """On a batch that `maybe_context_parallel` cut: see that its rows are what they seemed, or packed documents."""
        seat = next(taken.seat for taken in self._taken if taken.model is model)
        if self.alone and not seat.original:
            self._keep_whole(seat, {"input_ids": args[0], **kwargs} if args else kwargs)
            return args, _without_packing(kwargs)
        if self._step is None or seat.original or seat.pack is None:
            return None
        pack, bounds = seat.pack, kwargs.get("cu_seq_lens_q")
        check_local(kwargs, pack, packed=bounds is not None)
        if bounds is not None:
            rows, tokens = pack.batch_shape[0], pack.partition.num_tokens
            packed = row_bounds(bounds, rows, tokens // rows)
            pack = seat.packed(packed, layout="zigzag", device=pack.device)
            for taken in self._taken:
                self._step.enter_context(taken.seat.hold(pack))
        return args, _without_packing(kwargs)

    def _keep_whole(self, seat: Seat, inputs: dict[str, Any]) -> None:
        """Put a batch that one rank has whole on the seat, until the next one comes."""
        shape = read_shape(inputs)
        check_media(inputs)
        check_padding(inputs.get("attention_mask"), inputs.get("position_ids"), shape)
        seat.keep(self.pack_of(shape))

    def _last_pack(self) -> Pack | None:
        """What the last forward ran on, None where that was whole rows."""
        seat = self._taken[0].seat if self._taken else None
        return None if seat is None or seat.original else seat.pack

    def _seat(self) -> Seat:
        if not self._taken:
            raise RuntimeError("cp_gdn: no model is prepared; call accelerator.prepare(model, optimizer, ..) first")
        return self._taken[0].seat


def _without_packing(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name not in PACKING}


def token_dims(buffers: Sequence[Tensor], dims: Sequence[int]) -> list[int]:
    """The dims to cut: those given, but the last one of [k, B, S] position ids, where callers give that of the rows."""
    fixed = list(dims)
    if buffers and len(buffers) == len(dims):
        length = buffers[0].shape[dims[0]]
        for i, (x, dim) in enumerate(zip(buffers, dims, strict=True)):
            if x.dim() == 3 and not x.is_floating_point() and x.shape[dim] != length == x.shape[-1]:
                fixed[i] = 2
    return fixed


def _wrap_layers_that_are_there(model: nn.Module) -> Callable[[], None]:
    """Take layers that the model does not have off its list of those that FSDP wraps; returns how to put them back.

    A text model's list has the multimodal model's vision blocks too, and Accelerate ends where it does not find one.
    """
    listed = list(getattr(model, "_no_split_modules", None) or ())
    there = {type(module).__name__ for module in model.modules()}
    kept = [name for name in listed if name in there]
    if kept and kept != listed:
        model._no_split_modules = kept  # type: ignore[assignment]
    return lambda: vars(model).pop("_no_split_modules", None) and None


def _check_layer_types(model: nn.Module) -> None:
    """Keep Accelerate's refusal for layers that cp_gdn cannot split either."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    types = set(getattr(config, "layer_types", None) or ())
    unknown = sorted(types - {"full_attention", "linear_attention"})
    if unknown:
        raise ValueError(
            f"cp_gdn: {type(model).__name__} has layers of type {', '.join(unknown)}; only Gated DeltaNet "
            "(linear_attention) and full causal attention (full_attention) can be split over context-parallel ranks"
        )
