"""Rows of real text for the examples, byte by byte: the sources of Python's own library. No download, no tokenizer."""

import argparse
from itertools import islice, pairwise
from typing import Any

import torch
import transformers

from cp_gdn.cli.demo_data import packs

VOCAB = 256
FAMILIES = ("qwen3_next", "qwen3_5")


def arguments(description: str) -> argparse.ArgumentParser:
    """What both examples take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_next", help="which model is made, at random")
    packed = "rows of documents that do not see each other; not split they need flash-linear-attention or --on-one-rank"
    parser.add_argument("--packed", action="store_true", help=packed)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row, a multiple of 2 * cp_size")
    parser.add_argument("--rows", type=int, default=1, help="rows of a batch; 1 with --packed")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8, help="every fourth is softmax attention")
    parser.add_argument("--head-dim", type=int, default=128, help="of the Gated DeltaNet heads; kernels are for 128")
    parser.add_argument("--on-one-rank", action="store_true", help="cp_gdn's layers and kernels without a split, too")
    parser.add_argument("--out", default="example-output", help="folder of checkpoints, metrics and the model")
    parser.add_argument("--resume", default=None, help="a checkpoint to go on from")
    return parser


def build_model(args: argparse.Namespace) -> transformers.PreTrainedModel:
    """A small model with random weights, the same in every process."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": args.hidden,
        "intermediate_size": 2 * args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": args.hidden // 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": args.head_dim,
        "linear_value_head_dim": args.head_dim,
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    torch.manual_seed(0)
    if args.family == "qwen3_next":
        dense = {"num_experts": 0, "mlp_only_layers": list(range(args.layers))}
        return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**sizes, **dense))
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**sizes))


def make_rows(args: argparse.Namespace, count: int, seed: int) -> list[dict[str, Any]]:
    """`count` rows: tokens [S], and the boundaries of their documents."""
    found = islice(packs(seed, args.length), count)
    return [{"input_ids": pack.tokens, "bounds": pack.cu_seqlens} for pack in found]


def rows_of_one_document(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch [B, S]; documents of a row see what stands before them."""
    ids = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids.clone()}


def row_of_documents(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A packed batch [1, S] as transformers' padding-free collator makes it: no document sees another one."""
    (row,) = rows
    ids, bounds = row["input_ids"][None], torch.tensor(row["bounds"], dtype=torch.int32)
    labels = ids.clone()
    labels[:, bounds[:-1].long()] = -100  # nothing stands before a document's first token
    longest = int(bounds.diff().max())
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.cat([torch.arange(b - a) for a, b in pairwise(row["bounds"])])[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
