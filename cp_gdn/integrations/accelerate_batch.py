"""A batch as a dataloader gives it, checked and cut to this rank's tokens.

Labels are shifted and boundaries read on the whole batch, before anything is cut.
Legend: B rows, S tokens of a row, N = B * S tokens of the batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_gdn.integrations.pack import Pack
from cp_gdn.layout import partition
from cp_gdn.layout_checks import check_doc_bounds
from cp_gdn.sharding import shift_labels

IGNORED = -100
TOKEN_DIMS = {
    "input_ids": 1,
    "inputs_embeds": 1,
    "labels": 1,
    "shift_labels": 1,
    "attention_mask": 1,
    "position_ids": -1,  # [B, S], or [3, B, S] and [4, B, S] of a multimodal rotary embedding
    "token_type_ids": 1,
    "mm_token_type_ids": 1,
    "assistant_masks": 1,
    "completion_mask": 1,
    "loss_mask": 1,
}
"""The dim of the tokens in the entries that models and collators know."""

PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What a padding-free collator adds. The boundaries go into the pack; the model sees none of these."""

MEDIA = ("pixel_values", "image_", "video_", "input_features", "feature_attention_mask")

LEFT_PADDING = (
    "cp_gdn: attention_mask: got padding before tokens, expected it on the right (padding_side='right'): recurrent "
    "layers would carry the padding into the tokens behind it"
)
PACKED_WITHOUT_BOUNDS = (
    "cp_gdn: position_ids: got a position 0 inside a row, so it is packed, but no boundaries came with it, and its "
    "documents would see each other; pass cu_seqlens=, or let the collator give cu_seq_lens_q "
    "(DataCollatorWithFlattening(return_flash_attn_kwargs=True))"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """B rows of S tokens. bounds: global boundaries of the documents of a packed row (D + 1 ints), None for rows."""

    rows: int
    length: int
    bounds: tuple[int, ...] | None
    device: torch.device

    @property
    def doc_bounds(self) -> tuple[int, ...]:
        """Boundaries of all documents of the batch, its rows one after the other."""
        return self.bounds or tuple(row * self.length for row in range(self.rows + 1))


def read_shape(batch: Mapping[str, Any], cu_seqlens: Any = None) -> Shape:
    """The shape of a whole batch; its boundaries are `cu_seqlens`, else the collator's, else its rows.

    Raises:
        ValueError: no tokens, or boundaries that do not fit them.
    """
    tokens = next((batch[name] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None), None)
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        raise ValueError("cp_gdn: batch: got no input_ids or inputs_embeds, expected one of them with shape [B, S, ..]")
    rows, length = tokens.shape[0], tokens.shape[1]
    given = batch.get("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens
    bounds = None if given is None else row_bounds(given, rows, length)
    return Shape(rows=rows, length=length, bounds=bounds, device=tokens.device)


def row_bounds(given: Any, rows: int, length: int) -> tuple[int, ...]:
    """Boundaries of the documents of one packed row of `length` tokens, as ints; ValueError if they are not."""
    given = given.flatten() if isinstance(given, Tensor) and given.dim() == 2 and len(given) == 1 else given
    bounds = check_doc_bounds(given)
    if rows != 1:
        raise ValueError(f"cp_gdn: cu_seqlens: got it with {rows} rows, expected packed documents in one row [1, N]")
    if bounds[-1] != length:
        raise ValueError(
            f"cp_gdn: cu_seqlens: ends at {bounds[-1]}, expected {length}, the tokens of the row; boundaries are those "
            "of the whole row, and padding at its end is a document of its own: append its end"
        )
    return tuple(bounds.tolist())


def check_media(batch: Mapping[str, Any]) -> None:
    """Refuse what puts embeddings of images, videos or audio in the place of tokens."""
    media = [name for name, value in batch.items() if name.startswith(MEDIA) and value is not None]
    if media:
        raise ValueError(
            f"cp_gdn: batch: got {', '.join(media)}; images, video and audio cannot be split over context-parallel "
            "ranks: their embeddings replace tokens by place in the whole row. Train on text, or with cp_size=1"
        )


def check_padding(mask: Any, positions: Any, shape: Shape) -> None:
    """Refuse padding that is not on the right, and positions that say the rows are packed where no boundaries do.

    One read from the device, only if there is a mask or there are positions.
    """
    questions = []
    if mask is not None:
        if not isinstance(mask, Tensor) or tuple(mask.shape) != (shape.rows, shape.length):
            got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"cp_gdn: attention_mask: got {got}, expected [{shape.rows}, {shape.length}], 1 for tokens and 0 for "
                "padding on the right; a mask of pairs of tokens cannot be split"
            )
        mask = mask.bool()
        questions.append((mask[:, 1:] & ~mask[:, :-1]).any())
    if isinstance(positions, Tensor) and positions.dim() == 2 and shape.bounds is None:
        starts = positions[:, 1:] == 0
        questions.append((starts if mask is None else starts & mask[:, 1:]).any())
    answers = torch.stack(questions).tolist() if questions else []
    if mask is not None and answers[0]:
        raise ValueError(LEFT_PADDING)
    if any(answers):
        raise ValueError(PACKED_WITHOUT_BOUNDS)


def check_local(inputs: Mapping[str, Any], pack: Pack, *, packed: bool) -> None:
    """As `check_padding`, on this rank's part of zigzag rows, for all ranks alike: one message, where there is a mask
    or there are positions. Whatever is wrong in a row is wrong on some rank's part of it."""
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    real = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
    left, restarts = torch.zeros(2, dtype=torch.int64, device=pack.device)
    if real is not None:
        left = (real[:, 1:] & ~real[:, :-1]).sum()
    if isinstance(positions, Tensor) and positions.dim() == 2 and not packed:
        starts = (positions == 0) & (pack.positions != 0)
        restarts = (starts if real is None else starts & real).sum()
    if real is None and positions is None:
        return
    # A rank that raised by itself would leave the others in FSDP's collectives.
    padded, restarted = pack.comm.all_reduce_sum("INPUTS", torch.stack((left, restarts))).tolist()
    if padded:
        raise ValueError(LEFT_PADDING)
    if restarted:
        raise ValueError(PACKED_WITHOUT_BOUNDS)


def with_shifted_labels(batch: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """The entries of a whole batch, with shift_labels if it has labels: next-token labels inside each document."""
    entries = dict(batch)
    labels = entries.get("labels")
    if labels is not None and entries.get("shift_labels") is None:
        shifted = shift_labels(labels.reshape(-1), shape.doc_bounds, IGNORED)
        entries["shift_labels"] = shifted.view(labels.shape)
    return entries


def whole_entries(batch: Mapping[str, Any], shape: Shape, given: bool) -> dict[str, Any]:
    """The batch as the model takes it on one rank. `given`: boundaries came as an argument; the model must see them."""
    entries = with_shifted_labels(batch, shape)
    if shape.bounds is not None and given:
        bounds = torch.tensor(shape.bounds, dtype=torch.int32, device=shape.device)
        longest = int(bounds.diff().max()) if len(bounds) > 1 else 0
        values = (bounds, bounds, longest, longest)
        entries.update(zip(PACKING, values, strict=False))
    if shape.bounds is not None and entries.get("position_ids") is None:
        positions = partition(shape.bounds, 1).positions(0)
        entries["position_ids"] = torch.as_tensor(positions, device=shape.device)[None]
    return entries


def local_entries(
    entries: Mapping[str, Any], pack: Pack, shape: Shape, token_dims: Mapping[str, int]
) -> dict[str, Any]:
    """The batch as the model takes it on this rank: entries over tokens cut, positions added, packing taken out."""
    dims = {**TOKEN_DIMS, **token_dims}
    local = {name: value for name, value in entries.items() if name not in PACKING}
    for name, value in local.items():
        if name in dims:
            local[name] = value if value is None else _cut(name, value, pack, shape, dims[name])
        elif isinstance(value, Tensor) and value.dim() > 1 and tuple(value.shape[:2]) == (shape.rows, shape.length):
            raise ValueError(
                f"cp_gdn: batch: got {name!r} with shape {list(value.shape)}; say which dim holds its tokens with "
                f"token_dims={{{name!r}: 1}}, or take it out of the batch"
            )
    if local.get("position_ids") is None:
        local["position_ids"] = pack.positions
    return local


def _cut(name: str, value: Tensor, pack: Pack, shape: Shape, dim: int) -> Tensor:
    """This rank's tokens of one entry; the tokens lie in `dim` and the rows in the dim before it."""
    dim = dim % value.dim()
    if dim == 0 or value.shape[dim] != shape.length or value.shape[dim - 1] not in (1, shape.rows):
        raise ValueError(
            f"cp_gdn: {name}: got shape {list(value.shape)}, expected {shape.rows} rows of {shape.length} tokens in "
            f"dims {dim - 1} and {dim}, the whole batch"
        )
    sizes = [-1] * value.dim()
    sizes[dim - 1] = shape.rows
    rows = value.expand(sizes).movedim((dim - 1, dim), (0, 1))
    return pack.local(rows).movedim((0, 1), (dim - 1, dim)).contiguous()
