"""Every hook that a plugin may implement, and the markers to do it with. It calls none of them.

A plugin is a module, or an object, whose functions carry `hookimpl`; an entry point of the group "oarlock" names it.
A function may leave out arguments that it does not want. Hooks bind and observe; they are never called per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from oarlock.core.config import EngineConfig
    from oarlock.core.contracts.constraint import ConstraintFactory
    from oarlock.core.contracts.layout import CacheLayout, LayerInfo
    from oarlock.core.contracts.loader import Loader
    from oarlock.core.contracts.method import Method
    from oarlock.core.contracts.proposer import Proposer
    from oarlock.core.contracts.sampler import Processor, Sampler
    from oarlock.core.contracts.state_cache import StateCacheFactory
    from oarlock.core.request import Request
    from oarlock.core.result import FinishReason, Usage

PROJECT = "oarlock"
"""The pluggy project, and the entry-point group."""

OARLOCK_API = 1
"""The plugin API of this version. A plugin may declare the one it was written for under the same name."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# --- registration: called once, while the plugin manager is built ---------------------------------------


@hookspec
def register_layouts(register: Callable[[CacheLayout], None]) -> None:
    """Called when plugins are collected: call ``register(layout)`` for every cache layout."""


@hookspec
def register_methods(register: Callable[[Method], None]) -> None:
    """Called when plugins are collected: call ``register(method)`` for every grouped decoding method."""


@hookspec
def register_proposers(register: Callable[[Proposer], None]) -> None:
    """Called when plugins are collected: call ``register(proposer)`` for every source of drafts."""


@hookspec
def register_samplers(register: Callable[[Sampler], None]) -> None:
    """Called when plugins are collected: call ``register(sampler)`` for every sampler."""


@hookspec
def register_processors(register: Callable[[Processor], None]) -> None:
    """Called when plugins are collected: call ``register(processor)`` for every rewriter of scores."""


@hookspec
def register_constraints(register: Callable[[ConstraintFactory], None]) -> None:
    """Called when plugins are collected: call ``register(factory)`` for every kind of constraint."""


@hookspec
def register_policies(register: Callable[[Any], None]) -> None:
    """Called when plugins are collected: call ``register(policy)`` for every scheduling policy."""


@hookspec
def register_adapters(register: Callable[[Any], None]) -> None:
    """Called when plugins are collected: call ``register(adapter)`` for every kind of adapter."""


@hookspec
def register_loaders(register: Callable[[Loader], None]) -> None:
    """Called when plugins are collected: call ``register(loader)`` for every loader of models."""


@hookspec
def register_state_caches(register: Callable[[StateCacheFactory], None]) -> None:
    """Called when plugins are collected: call ``register(cache)`` for every state cache."""


@hookspec
def register_commands(register: Callable[[Any], None]) -> None:
    """Called when plugins are collected: call ``register(command)`` for every click command of ``oarlock``."""


# --- choice: called when a model is bound ----------------------------------------------------------------


@hookspec(firstresult=True)
def choose_layout(layer: LayerInfo, model: Any) -> str | None:
    """Return the registered name of the layout for a layer that the config does not name, or None."""


@hookspec(firstresult=True)
def choose_method(model: Any, config: EngineConfig) -> str | None:
    """Return the registered name of the decoding method for this model, or None."""


# --- observation: records are frozen; an observer that raises is logged once and disturbs nothing ---------


@hookspec
def model_bound(plan: Any) -> None:
    """Called when a model is bound; ``plan`` is the frozen `BoundModel`."""


@hookspec
def request_admitted(request: Request) -> None:
    """Called when a request leaves the queue and its prefill starts."""


@hookspec
def request_first_token(request: Request, elapsed: float) -> None:
    """Called when a request's first token is delivered, ``elapsed`` seconds after it was submitted."""


@hookspec
def request_finished(request: Request, reason: FinishReason, usage: Usage) -> None:
    """Called when a request has ended without an error, cancelled ones included."""


@hookspec
def request_failed(request: Request, error: BaseException) -> None:
    """Called when a request has ended with ``error``; its neighbours go on."""


@hookspec
def request_preempted(request: Request) -> None:
    """Called when a running request goes back to the head of the queue, to be recomputed later."""


@hookspec
def step_finished(step: Any) -> None:
    """Called when an iteration of the engine is over; ``step`` is a frozen `StepRecord`."""


OBSERVERS = (
    "model_bound",
    "request_admitted",
    "request_first_token",
    "request_finished",
    "request_failed",
    "request_preempted",
    "step_finished",
)
"""The hooks that observe: called one implementation at a time by `observe.Observers`."""
