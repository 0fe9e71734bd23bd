"""``oarlock serve``: a model behind HTTP. What is served, and how, stands in the files beside."""

from __future__ import annotations

import asyncio
import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oarlock.core.request import Request
from oarlock.plugins.cli.console import busy, note
from oarlock.plugins.cli.failures import Failure, require_mlx
from oarlock.plugins.cli.options import engine_config, engine_options, followed, ranks_option
from oarlock.plugins.cli.versions import untested

if TYPE_CHECKING:
    import socket

    from oarlock.core.config import EngineConfig
    from oarlock.core.contracts.loader import ToolFormat

DEFAULTS = ("max_tokens", "temperature", "top_p", "top_k", "min_p")


def _origins(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """Return origins as browsers send them: what differs from that would never be allowed."""
    for origin in given:
        scheme, _separator, rest = origin.partition("://")
        if origin != "*" and (not scheme or not rest or "/" in rest or origin != origin.lower()):
            msg = f"got {origin!r}; allowed: '*', and a scheme and a host in small letters, as http://localhost:3000"
            raise click.BadParameter(msg)
    return given


def _parser(_: click.Context, __: click.Parameter, name: str | None) -> ToolFormat | None:
    """Return the format of one of mlx-lm's parsers, named by whoever starts the server."""
    if name is None:
        return None
    require_mlx()
    import importlib
    import pkgutil

    from mlx_lm import tool_parsers

    from oarlock.core.contracts.loader import ToolFormat

    known = sorted(found.name for found in pkgutil.iter_modules(tool_parsers.__path__))
    if name not in known:
        msg = f"got {name!r}; allowed: {', '.join(known)}"
        raise click.BadParameter(msg)
    found = importlib.import_module(f"{tool_parsers.__name__}.{name}")
    return ToolFormat(start=found.tool_call_start, end=found.tool_call_end, parse=found.parse_tool_call)


@click.command(
    short_help="Serve a model over HTTP, with a page that shows the batch.",
    epilog="Example: oarlock serve smollm2 --port 8080, then open http://127.0.0.1:8080/",
)
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen; other machines reach 0.0.0.0.")
@click.option("--port", default=8080, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--name", help="The model's name for clients; else the last part of MODEL.")
@click.option("--api-key", envvar="OARLOCK_API_KEY", show_envvar=True, help="Clients must send it as a bearer token.")
@click.option("--allow-host", multiple=True, metavar="NAME", help="Answer to this Host header as well (repeatable).")
@click.option(
    "--allow-origin", multiple=True, metavar="URL", callback=_origins, help="Let pages of it ask (repeatable)."
)
@click.option("--max-body", default=10 << 20, show_default=True, type=click.IntRange(1), help="Most bytes of a body.")
@click.option(
    "--drain-seconds", default=60.0, show_default=True, type=click.FloatRange(0), help="Longest wait at SIGTERM."
)
@click.option(
    "--tool-parser",
    metavar="NAME",
    callback=_parser,
    help="How the model calls tools, by mlx-lm's name: json_tools, mistral...",
)
@click.option("--max-tokens", type=int, help="Of answers whose request names no limit.")
@click.option("--temperature", type=float, help="Likewise; else what the model's makers advise, else 1.")
@click.option("--top-p", type=float, help="Likewise; else their advice, else 1.")
@click.option("--top-k", type=int, help="Likewise; else their advice, else 0, which is off.")
@click.option("--min-p", type=float, help="Likewise; else their advice, else 0.")
@engine_options
@ranks_option
def serve(
    model: str,
    host: str,
    port: int,
    name: str | None,
    api_key: str | None,
    allow_host: tuple[str, ...],
    allow_origin: tuple[str, ...],
    max_body: int,
    drain_seconds: float,
    tool_parser: ToolFormat | None,
    ranks: bool,
    **given: Any,
) -> None:
    """Serve a model with OpenAI's interface at /v1, metrics at /metrics, and a page at /.

    MODEL: a directory, a GGUF file, a hub name, or smollm2. It listens on this machine alone unless --host says
    otherwise; then set a key. The first SIGTERM or Ctrl-C lets answers end, the second does not.
    """
    require_mlx()
    _require_server()
    defaults = {key: given[key] for key in DEFAULTS if given[key] is not None}
    Request.from_mapping({"prompt": "x", **defaults})  # what is wrong is said before a model is loaded
    _warn(host, allow_origin, api_key)
    options = {"key": api_key or "", "hosts": _hosts(host, allow_host), "origins": allow_origin, "max_body": max_body}
    name = name or Path(model).name.removesuffix(".gguf") or model
    config = engine_config(**given)
    group = followed(model, config, ranks)
    with _listen(host, port) as made:
        asyncio.run(_serve(model, name, config, group, defaults, tool_parser, made, options, drain_seconds))


def _require_server() -> None:
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        msg = f"a server needs: pip install 'oarlock[serve]' ({error})"
        raise Failure(msg) from error


def _hosts(host: str, more: tuple[str, ...]) -> tuple[str, ...]:
    """Return the Host headers that are answered to; all, where other machines ask."""
    from oarlock.plugins.server.guard import LOOPBACK

    return (*LOOPBACK, *more) if _is_loopback(host) else ()


def _warn(host: str, origins: tuple[str, ...], key: str | None) -> None:
    """Say what whoever starts this may not have meant."""
    for text in untested():
        note(f"warning: {text}")
    if not _is_loopback(host) and not key:
        note("warning: whoever reaches this machine can use the model; set a key with OARLOCK_API_KEY")
    if "*" in origins and not key:
        note("warning: every web page that is open here can use the model; set a key with OARLOCK_API_KEY")


def _listen(host: str, port: int) -> socket.socket:
    from oarlock.plugins.server.serving import listen

    try:
        return listen(host, port)
    except OSError as error:
        msg = f"cannot listen on {host} port {port}: {error.strerror or error}"
        raise Failure(msg) from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _serve(
    model: str,
    name: str,
    config: EngineConfig,
    group: Any,
    defaults: dict[str, Any],
    tool_format: ToolFormat | None,
    made: socket.socket,
    options: dict[str, Any],
    drain_seconds: float,
) -> None:
    """Answer until a signal, then close the engine."""
    import uvicorn

    from oarlock.plugins.server.app import create_app
    from oarlock.plugins.server.service import open_service
    from oarlock.plugins.server.serving import DrainingServer, address

    with busy(f"loading {model}"):
        service = await open_service(
            model, name, config=config, group=group, defaults=defaults, tool_format=tool_format
        )
    async with service.engine:
        note(f"serving {', '.join(service.names)} at {address(made)}/v1, its page at {address(made)}/")
        app = create_app(service, **options)
        wire = uvicorn.Config(app, log_level="warning", lifespan="off", server_header=False)
        await DrainingServer(wire, service, drain_seconds).serve(sockets=[made])
    if (lost := service.engine.engine.lost) is not None:
        raise lost
