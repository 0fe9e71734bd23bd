"""Models kept as mlx-lm keeps them: directories and hub names. Other file formats are elsewhere, see `oarlock.plugins.gguf`."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from structlog import get_logger

from oarlock.core import errors, hookimpl
from oarlock.core.contracts.loader import LoadedModel
from oarlock.plugins.tokenizer import HFTokenizer, eos_ids, one_line

if TYPE_CHECKING:
    import mlx.core as mx

OARLOCK_API = 1

_log = get_logger(__name__)

DTYPES = ("auto", "stored", "float32", "bfloat16", "float16")

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.jinja", "*.txt", "*.tiktoken", "model*.safetensors", "tokenizer.model"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "*.tiktoken")
_WHOLE_FILE = 256 << 20  # bytes: a larger file is sampled by `fingerprint`
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 20


def weight_dtype(dtype: str, num_parameters: int) -> mx.Dtype | None:
    """Return what ``dtype`` of the contract means on this machine; None stands for "as stored".

    "auto" on the CPU is float32 where that takes less than three quarters of the memory, since MLX multiplies
    float32 much faster there than anything smaller.
    """
    import mlx.core as mx

    if dtype not in DTYPES:
        key = "model.dtype"
        raise errors.InvalidConfigValue(key, dtype, ", ".join(DTYPES))
    if dtype == "stored" or (dtype == "auto" and mx.default_device().type != mx.DeviceType.cpu):
        return None
    if dtype == "auto":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if 4 * num_parameters > memory * 3 // 4:
            _log.warning("float32_does_not_fit", needed=4 * num_parameters, memory=memory, used="stored")
            return None
        return mx.float32
    found: mx.Dtype = getattr(mx, dtype)
    return found


def evaluate(model: Any) -> None:
    """Evaluate every array of ``model``, private ones (RoPE frequencies) included.

    A lazy array made on one thread cannot be evaluated on another.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten

    for module in model.modules():
        leaves: Any = tree_flatten([*module.values(), *vars(module).values()])
        mx.eval([leaf for _, leaf in leaves if isinstance(leaf, mx.array)])


def fingerprint(paths: Iterable[Path], *facts: str) -> str:
    """Return a name for the weights in ``paths`` as loaded with ``facts`` (the dtype).

    Hashed are names, sizes and contents. Of a file over 256 MiB: 64 pieces of 1 MiB, evenly spaced, and the time
    of its last change, so that an edit between two pieces is noticed too.
    """
    digest = hashlib.sha256("\0".join(facts).encode())
    for path in sorted(paths):
        stat = path.stat()
        digest.update(f"{path.name}\0{stat.st_size}\0".encode())
        with path.open("rb") as file:
            if stat.st_size <= _WHOLE_FILE:
                digest.update(hashlib.file_digest(file, "sha256").digest())
                continue
            digest.update(str(stat.st_mtime_ns).encode())
            for piece in range(_SAMPLES):
                file.seek(piece * (stat.st_size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _cast(source: str, model: Any, dtype: mx.Dtype) -> Any:
    """Return ``model`` with dense weights of ``dtype``, but for those that the model keeps as they are."""
    import mlx.core as mx
    from mlx.utils import tree_map_with_path
    from mlx_lm.utils import dequantize_model

    def to(kind: mx.Dtype, keep: Callable[[str], bool]) -> None:
        def one(path: str, array: mx.array) -> mx.array:
            return array.astype(kind) if mx.issubdtype(array.dtype, mx.floating) and keep(path) else array

        model.update(tree_map_with_path(one, model.parameters()))

    quantized = [module for module in model.modules() if "scales" in module]
    if any("global_scale" in module for module in quantized):
        msg = "its quantized weights have a global scale, which mlx-lm cannot dequantize; load it with dtype 'stored'"
        raise errors.UnsupportedModel(source, msg)
    if quantized:
        to(mx.float32, lambda _path: True)  # scales first: code times scale is then exact
        model = dequantize_model(model)
    to(dtype, getattr(model, "cast_predicate", lambda _path: True))
    return model


class MlxLmLoader:
    """Loads a directory with ``config.json`` and safetensors, or a hub name such as ``org/name``.

    A named dtype makes quantized weights dense; "stored" keeps them. Code that a model brings along is never run.
    """

    name = "mlx_lm"
    prepares = True

    def accepts(self, source: str) -> bool:
        return (source != "" and Path(source).is_dir()) or _HUB_NAME.fullmatch(source) is not None

    def load(self, source: str, *, dtype: str = "auto", prepare: Callable[[Any], None] | None = None) -> LoadedModel:
        from mlx_lm.utils import get_total_parameters, load_model

        path = _find(source)
        config = _read_json(source, path / "config.json")
        weight_dtype(dtype, 0)  # refuse an unknown name before the work
        try:
            model, _ = load_model(path, lazy=True)
            kind = weight_dtype(dtype, get_total_parameters(model))
            if kind is not None:
                model = _cast(source, model, kind)
            if prepare is not None:
                prepare(model)
            evaluate(model)
        except errors.LoadError:
            raise
        except FileNotFoundError as error:
            msg = f"{path} has a config.json but no model*.safetensors"
            raise errors.ModelNotFound(source, msg) from error
        except (ValueError, TypeError, LookupError, RuntimeError, AttributeError) as error:
            msg = f"mlx-lm cannot load it: {one_line(error)}"
            raise errors.UnsupportedModel(source, msg) from error
        advice = path / "generation_config.json"
        generation = json.loads(advice.read_text(encoding="utf-8")) if advice.exists() else {}
        files = [path / "config.json", *path.glob("model*.safetensors")]
        return LoadedModel(
            model=model,
            tokenizer=_load_tokenizer(source, path, eos_ids(config) | eos_ids(generation)),
            identity=fingerprint(files, str(kind)),
            model_type=config["model_type"],
            positions=_positions(config),
            sampling=_advised(generation),
        )


def _find(source: str) -> Path:
    path = Path(source)
    if source and path.is_dir():
        return path
    if path.is_file():
        msg = "it is a file; mlx-lm models are directories"
        raise errors.ModelNotFound(source, msg)
    if _HUB_NAME.fullmatch(source) is None:
        msg = "no such directory, and hub names look like org/name"
        raise errors.ModelNotFound(source, msg)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(source, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, OSError, ValueError) as error:
        msg = f"no such directory, and the hub does not give it: {one_line(error)}"
        raise errors.ModelNotFound(source, msg) from error


def _read_json(source: str, path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        msg = f"{path.parent} has no config.json"
        raise errors.NoModelConfig(source, msg) from error
    except ValueError as error:
        msg = f"{path} is not JSON: {one_line(error)}"
        raise errors.NoModelConfig(source, msg) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        msg = f"{path} names no model_type"
        raise errors.NoModelConfig(source, msg)
    return config


def _load_tokenizer(source: str, path: Path, ends: frozenset[int]) -> HFTokenizer | None:
    if not any(next(path.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        return None
    from mlx_lm.utils import load_tokenizer

    try:
        tokenizer = load_tokenizer(path, tokenizer_config_extra={"trust_remote_code": False})
    except (OSError, ValueError, TypeError, LookupError, ImportError) as error:
        msg = f"its tokenizer cannot be read: {one_line(error)}"
        raise errors.UnsupportedModel(source, msg) from error
    return HFTokenizer(tokenizer, ends)


_ADVICE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def _advised(advice: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a model's makers advise to draw; nothing where they do not, or advise not to draw."""
    if not advice.get("do_sample"):
        return {}
    return {name: advice[name] for name in _ADVICE if advice.get(name) is not None}


def _positions(config: Mapping[str, Any]) -> int | None:
    """Return the most tokens of a sequence; ``n_positions`` is gpt2's name for it."""
    for part in (config, config.get("text_config") or {}):
        for key in ("max_position_embeddings", "n_positions"):
            if isinstance(part.get(key), int):
                return int(part[key])
    return None


@hookimpl
def register_loaders(register: Callable[[Any], None]) -> None:
    """Offer the loader of mlx-lm directories and hub names."""
    register(MlxLmLoader())
