"""`furcate inspect`: an engine's manifest as a person wants to read it."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from furcate.builder.engine import Manifest, head_prefix, read_engine
from furcate.builder.network.spec import HeadKind, HeadSpec


def print_engine(path: Path) -> None:
    """Prints what the engine at `path` is. Raises EngineMismatch when it is none, or damaged."""
    manifest = read_engine(path).manifest
    table = Table(show_header=False, box=None, title=f"{manifest.name}", title_justify="left")
    for name, value in description(manifest).items():
        table.add_row(name, value)
    Console().print(table)


def description(manifest: Manifest) -> dict[str, str]:
    """What an engine is, line by line."""
    target, per_token = manifest.target, manifest.kv_bytes_per_token()
    rows = {
        "target": f"{manifest.sources['target']}: {target.architecture}, {target.num_layers} layers, hidden {target.hidden_size}, "
        f"{target.num_query_heads} query and {target.num_kv_heads} K/V heads of {target.head_dim}",
        "vocabulary": f"{target.vocab_size} tokens, lm_head {'tied to the embeddings' if target.is_tied else 'its own'}",
        "rotary": f"{target.rope.kind.value}, theta {target.rope.theta:g}",
        **_head_lines(manifest),
        "tree": f"{manifest.tree}: at most {manifest.tree.budget} nodes with the root, depth {manifest.tree.max_depth}",
        "acceptance": manifest.acceptance.value
        + ("" if manifest.acceptance.is_lossless else ": LOSSY, texts do not follow the target's distribution"),
        "budget": "adaptive: a step drafts the whole tree, a small one or nothing"
        if manifest.is_adaptive
        else "fixed: every step drafts the whole tree",
        "tuned": "no"
        if manifest.tuning is None
        else f"on {manifest.tuning['device']}, {manifest.tuning['chosen']} chosen",
        "executor": f"{manifest.executor.value}, {manifest.dtype.value}"
        + ("" if manifest.weight_format is None else f", quantised weights kept in {manifest.weight_format}"),
        "limits": f"{manifest.max_batch_size} sequences a step, {manifest.max_context_tokens} tokens of prompt and answer, "
        f"prompt chunks of {manifest.prefill_chunk_tokens}",
        "K/V cache": f"{per_token} bytes a token, pages of {manifest.page_size} tokens, pool of {manifest.max_pool_tokens} tokens "
        f"({per_token * manifest.max_pool_tokens / 2**20:.0f} MiB)",
        "ends at": f"token ids {', '.join(map(str, manifest.eos_token_ids)) or 'none'}",
        "chat template": "yes" if manifest.has_chat_template else "no",
        "built with": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
        "files": f"{len(manifest.files)}, all present and unchanged",
    }
    return rows


def _head_lines(manifest: Manifest) -> dict[str, str]:
    """One line a head."""
    if manifest.head is None:
        return {"head": "none: plain decoding"}
    names = [head_prefix(place) for place in range(len(manifest.heads))]
    return {
        name: f"{manifest.sources[name]}: {_described(head, manifest)}"
        for name, head in zip(names, manifest.heads, strict=True)
    }


def _described(head: HeadSpec, manifest: Manifest) -> str:
    taps = ", ".join(map(str, head.feature_layers))
    draft = f"drafts from {head.draft_vocab_size} tokens"
    if head.kind is HeadKind.MODEL and head.decoder is not None:
        return f"a draft model of {head.decoder.num_layers} layers, hidden {head.hidden_size}"
    if head.num_heads:
        return f"{head.kind.value}, {head.num_heads} heads of {head.num_blocks} blocks, {draft}"
    where = (
        f"features entering layers {taps}"
        if taps != str(manifest.target.num_layers)
        else "features after the final norm"
    )
    return f"{head.kind.value}, {where}, {draft}"
