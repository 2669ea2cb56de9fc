"""``trainbus checkpoint export`` and ``import``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from trainbus import convert
from trainbus.cli.common import FileOrURL, check_checkpoint, check_file, say, status_of
from trainbus.eventloop import checkpoint
from trainbus.eventloop.checkpoint import AnyPath, RemotePath, plain_tree
from trainbus.eventloop.errors import CheckpointError
from trainbus.eventloop.training import convert_foreign
from trainbus.eventloop.training.schema import lacking

if TYPE_CHECKING:
    from trainbus.eventloop.checkpoint import CommitInfo


def export(
    file: FileOrURL,
    out: FileOrURL,
    /,
    *,
    weights: bool = False,
    dcp: bool = False,
    torchtitan: bool = False,
    hf: bool = False,
    config: Path | None = None,
    raw: bool = False,
    strip: bool = False,
    model: str | None = None,
    force: bool = False,
) -> None:
    """Write a checkpoint, or its weights, for other programs.

    Without --dcp and --hf: a file for torch.load(weights_only=True), or plain safetensors. A folder is written tensor by
    tensor, so the checkpoint may be larger than the memory.

    Args:
        file: a checkpoint, or its URL. It is verified.
        out: a .pth file, with --weights also a .safetensors file, or a URL; with --dcp or --hf a folder.
        weights: only the state_dict, for inference; the averaged weights if the checkpoint has any.
        dcp: a folder for torch.distributed.checkpoint.load, with the optimizer by parameter name.
        torchtitan: with --dcp: torchtitan's keys.
        hf: a folder for from_pretrained of Hugging Face's transformers.
        config: with --hf: the config.json of the model, or a folder with it.
        raw: with --weights, --dcp or --hf: the raw weights instead of averaged ones.
        strip: with --weights or --hf: remove module. and _orig_mod. from names.
        model: with --weights or --hf: name of the model, if the checkpoint has several.
        force: replace OUT if it exists.
    """
    kinds = {"weights": weights, "dcp": dcp, "hf": hf}
    if len(given := [f"--{kind}" for kind, wanted in kinds.items() if wanted]) > 1:
        raise CheckpointError(f"{' and '.join(given)} exclude each other; give one")
    for option, value, needed in (
        ("raw", raw, ("weights", "dcp", "hf")),
        ("strip", strip, ("weights", "hf")),
        ("model", model, ("weights", "hf")),
        ("torchtitan", torchtitan, ("dcp",)),
        ("config", config, ("hf",)),
    ):
        if value and not any(kinds[kind] for kind in needed):
            words = " or ".join(f"--{kind}" for kind in needed)
            raise CheckpointError(f"--{option} works only with {words}; add that")
    if out.suffix == ".safetensors" and not weights and not (dcp or hf):
        raise CheckpointError(f"{out}: a checkpoint is safetensors already; give --weights to export only its weights")
    check_checkpoint(file)
    _check_free(file, out, force=force, folder=dcp or hf)
    key = _key_of_weights(file, raw=raw)
    if dcp or hf:
        how = _export_folder(file, out, key, torchtitan=torchtitan, config=config, strip=strip, model=model, hf=hf)
        size = sum(one.stat().st_size for one in Path(str(out)).iterdir())
        say(("exported ", "bold"), f"{out}  {decimal(size)}, {how}")
        return
    if weights:
        convert.export_weights(file, out, key=key, strip=strip, model=model)
    else:
        convert.export_tree(file, out)
    what = "weights" if weights else "the whole checkpoint"
    how = "safetensors" if out.suffix == ".safetensors" else "torch.load(..., weights_only=True)"
    say(("exported ", "bold"), f"{out}  {decimal(status_of(out)[1])}, {what}, for {how}")


def _key_of_weights(file: AnyPath, *, raw: bool) -> str:
    if not raw:
        return "state_dict"
    from trainbus.hooks.ema import RAW_WEIGHTS

    tree = plain_tree(file)
    if isinstance(tree, Mapping) and RAW_WEIGHTS not in tree and "state_dict" in tree:
        raise CheckpointError("this checkpoint has no averaged weights: its state_dict is raw already; leave out --raw")
    return RAW_WEIGHTS


def _export_folder(
    file: AnyPath, out: AnyPath, key: str, *, torchtitan: bool, config: Path | None, strip: bool, model: str | None, hf: bool
) -> str:
    if isinstance(out, RemotePath):
        raise CheckpointError(f"{out} is a URL; --dcp and --hf write local folders, to be copied from there")
    if hf and config is None:
        raise CheckpointError(
            "--hf needs the model's configuration: --config FILE (model.config.save_pretrained(...) writes it)"
        )
    contents, scores = convert.open_contents(file), checkpoint.scores_of(file)
    if config is not None:
        weights = checkpoint.pick_weights(contents.tree, key=key, strip=strip, model=model)
        convert.write_safetensors(weights, contents, out, config, scores)
        return "weights, for from_pretrained"
    from trainbus.convert.dcp_write import write_dcp  # takes a second to import

    write_dcp(convert.to_dcp(contents.tree, key=key, torchtitan=torchtitan), contents, out, scores)
    return "torchtitan's keys" if torchtitan else "model and optimizer, for torch.distributed.checkpoint.load"


def import_(file: Path, out: FileOrURL, /, *, force: bool = False) -> None:
    """Convert a checkpoint of another program, without running code from it.

    It may be a file of torch.save, also MMEngine's, or a folder: of torch.distributed.checkpoint (torchtitan, FSDP2,
    Accelerate) or of safetensors files (Hugging Face). Above 1 GiB the result is sharded.

    Args:
        file: a .pth file (or .pt, .ckpt …), or a folder.
        out: a .safetensors file, or its URL.
        force: replace OUT if it exists.
    """
    if out.suffix != ".safetensors":
        raise CheckpointError(f"{out}: the name of a checkpoint must end in .safetensors")
    if not file.is_dir():
        check_file(file)
    _check_free(file, out, force=force)
    if file.is_dir():
        written, notes = _import_folder(file, out)
    else:
        state, notes = _converted(convert.load_pth(file))
        written = checkpoint.save(state, out)
    say(("imported  ", "bold"), f"{out}  {decimal(written.bytes)}, {written.digest}")
    for name, text in notes.items():
        say((f"{name:10}", "dim"), text)


def _import_folder(folder: Path, out: AnyPath) -> tuple[CommitInfo, dict[str, str]]:
    contents = convert.open_folder(folder)
    contents.tree, notes = convert.convert_folder(contents.tree) if lacking(contents.tree) else _converted(contents.tree)
    written = convert.save_contents(contents, out)
    checkpoint.sweep_shards(out.parent)  # those of a checkpoint that this one has replaced
    if (shards := checkpoint.sharded_in(plain_tree(out))) is not None:
        notes = {"sharded": f"the tensors are in {shards} beside it", **notes}
    return written, notes


def _converted(tree: Any) -> tuple[Any, dict[str, str]]:
    """Convert a tree to a checkpoint; return it with notes to print."""
    if (converted := convert_foreign(tree)) is not None:
        return converted
    if checkpoint.is_weights(tree):
        return {"state_dict": dict(tree)}, {"from": "a state_dict, stored under that key", "resumes": "nothing but the weights"}
    if not lacking(tree):
        return tree, {"from": "an export of trainbus", "resumes": "the run"}
    nothing = "nothing; trainbus.eventloop.checkpoint.load reads it"
    if not isinstance(tree, Mapping):
        return tree, {"from": f"a {type(tree).__name__}, unchanged", "resumes": nothing}
    keys = ", ".join(map(str, list(tree)[:8])) + (" …" if len(tree) > 8 else "")
    weights = "nothing but the weights: load_weights(model, load(OUT)['state_dict'])"
    return tree, {"from": f"a dict, unchanged: {keys}", "resumes": weights if "state_dict" in tree else nothing}


def _check_free(file: AnyPath, out: AnyPath, *, force: bool, folder: bool = False) -> None:
    """Raise CheckpointError if ``out`` exists (without ``force``), is ``file`` itself, or its directory does not exist."""
    if not isinstance(out, RemotePath) and not out.parent.is_dir():  # a remote directory exists once it has a file
        raise CheckpointError(f"{out.parent}: no such directory; create it first")
    if out.is_dir() and not folder:
        raise CheckpointError(f"{out} is a directory; name a file in it")
    if out.exists():
        if status_of(out)[0] == status_of(file)[0]:
            raise CheckpointError(f"{out} is also the file to read; give another name")
        if folder and not out.is_dir():
            raise CheckpointError(f"{out} is a file; name a folder")
        if folder and not isinstance(file, RemotePath) and Path(str(out)).resolve() in file.resolve().parents:
            raise CheckpointError(f"{out} has the checkpoint in it and would be replaced; name another folder")
        if not force:
            raise CheckpointError(f"{out} exists; add --force to replace it")
