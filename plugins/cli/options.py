"""Options that several commands share, and what they make: an `EngineConfig`, request fields, a loaded engine."""

from __future__ import annotations

import contextlib
import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oarlock.core.config import EngineConfig
from oarlock.plugins.cli.blocking import blocked, disable_option
from oarlock.plugins.cli.console import busy, note
from oarlock.plugins.cli.failures import require_mlx
from oarlock.plugins.cli.versions import untested

if TYPE_CHECKING:
    from oarlock.core.engine import Engine

DTYPES = ("auto", "stored", "float32", "bfloat16", "float16")

Command = Callable[..., Any]


def _all(command: Command, *options: Callable[[Command], Command]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def engine_options(command: Command) -> Command:
    """Give a command the options of `engine_config`."""
    return _all(
        command,
        click.option("--config", type=click.Path(), metavar="FILE", help="An oarlock.toml."),
        click.option(
            "--set",
            "settings",
            multiple=True,
            metavar="SECTION.KEY=VALUE",
            help="Change one setting, after --config (repeatable): --set scheduler.prefill_chunk=256.",
        ),
        click.option("--dtype", type=click.Choice(DTYPES), help="How weights are held; auto unless configured."),
        click.option("--max-batch", type=int, help="Most rows that run together; 16 unless configured."),
        disable_option,
    )


def ranks_option(command: Command) -> Command:
    """Give a command the option of `followed`."""
    return click.option(
        "--ranks", is_flag=True, help="Split the model over the processes of mlx.launch; the first one takes requests."
    )(command)


def sampling_options(command: Command) -> Command:
    """Give a command the options of `request_fields`."""
    return _all(
        command,
        click.option("--max-tokens", type=int, help="Most tokens of an answer.  [default: 256]"),
        click.option("--temperature", type=float, help="0 takes the most probable token.  [default: 0]"),
        click.option("--top-p", type=float, help="Draw from this share of the probability.  [default: 1]"),
        click.option("--top-k", type=int, help="Draw from the best k tokens; 0 is off.  [default: 0]"),
        click.option("--min-p", type=float, help="Least probability, as a share of the best token's.  [default: 0]"),
        click.option("--seed", type=int, help="Makes draws repeatable; without one, a fresh one is drawn."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End before this text (repeatable)."),
        click.option("--logprobs", type=int, metavar="N", help="Log-probabilities: of each token, and of the N best."),
        click.option(
            "--constraint",
            callback=_json,
            metavar="JSON",
            help='What an answer must be: {"regex": "[a-z]+"}, or json_schema, json_object, lark, choice.',
        ),
    )


def _json(_: click.Context, __: click.Parameter, text: str | None) -> Any:
    """Return what an option holds that is written as JSON."""
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        msg = f"it is not JSON: {error}"
        raise click.BadParameter(msg) from error


def request_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was given of the sampling options, as fields of a request."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "logprobs", "constraint")
    return {name: given[name] for name in names if given[name] not in (None, ())}


def engine_config(
    *,
    config: str | None = None,
    settings: tuple[str, ...] = (),
    dtype: str | None = None,
    max_batch: int | None = None,
    **_: Any,
) -> EngineConfig:
    """Return the file's configuration, changed by ``--set``, then by the other options and the blocked plugins."""
    EngineConfig.load(config)  # what is wrong in the file is said of the file
    merged: dict[str, Any] = {} if config is None else tomllib.loads(Path(config).read_text(encoding="utf-8"))
    for setting in settings:
        _assign(merged, setting)
    if dtype is not None:
        merged.setdefault("model", {})["dtype"] = dtype
    if max_batch is not None:
        merged.setdefault("scheduler", {})["max_batch"] = max_batch
    loaded = EngineConfig.load(merged)
    names = blocked()
    if not names:
        return loaded
    enable = tuple(name for name in loaded.plugins.enable if name not in names)  # a flag outranks the file
    return loaded.updated({"plugins": {"disable": (*loaded.plugins.disable, *names), "enable": enable}})


def _assign(merged: dict[str, Any], setting: str) -> None:
    """Put one ``section.key=value`` into a mapping shaped like the file. The value is TOML, else a bare string."""
    path, equals, text = setting.partition("=")
    keys = path.strip().split(".", 2 if path.strip().startswith("layouts.layers.") else 1)
    if not equals or len(keys) < 2 or not all(keys):
        msg = f"{setting!r} is not SECTION.KEY=VALUE, such as scheduler.max_batch=4"
        raise click.UsageError(msg)
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    place = merged
    for key in keys[:-1]:
        inner = place.setdefault(key, {})
        if not isinstance(inner, dict):
            msg = f"--set {path}: {key!r} is no table"
            raise click.UsageError(msg)
        place = inner
    place[keys[-1]] = value


def followed(model: str, config: EngineConfig, ranks: bool) -> Any:
    """Return the group of ranks that this process leads, or None where there is none; any other rank works and exits here."""
    if not ranks:
        return None
    require_mlx()
    from oarlock.plugins.ranks.opening import join, open_ranks

    launched = join(os.environ.get("MLX_HOSTFILE", ""))
    if not launched.leads:
        open_ranks(model, launched, config=config, say=note).follow()
        raise click.exceptions.Exit(0)
    return launched


@contextlib.contextmanager
def open_engine(model: str, config: EngineConfig, group: Any = None) -> Iterator[Engine]:
    """Load a model, or this rank's part of it, and bind it; close the engine at the end."""
    require_mlx()
    for text in untested():
        note(f"warning: {text}")
    # A hub download shows bars of its own.
    shown = busy(f"loading {model}") if "/" not in model or Path(model).exists() else contextlib.nullcontext()
    with shown:
        engine = _opened(model, config, group)
    with engine:
        yield engine


def _opened(model: str, config: EngineConfig, group: Any) -> Engine:
    if group is not None:
        from oarlock.plugins.ranks.opening import open_ranks

        return open_ranks(model, group, config=config, say=note)
    from oarlock.core.engine import Engine

    return Engine.load(model, config=config)
