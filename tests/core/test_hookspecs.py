"""The hooks: names, arguments and first words are public. Each hook is called once here as its user would see it."""

import inspect

import pluggy
import pytest

import oarlock.core
from oarlock.core import hookspecs
from oarlock.core.registry import Registries

HOOKS = {
    "register_layouts": ("register",),
    "register_methods": ("register",),
    "register_proposers": ("register",),
    "register_samplers": ("register",),
    "register_processors": ("register",),
    "register_constraints": ("register",),
    "register_policies": ("register",),
    "register_adapters": ("register",),
    "register_loaders": ("register",),
    "register_state_caches": ("register",),
    "register_commands": ("register",),
    "choose_layout": ("layer", "model"),
    "choose_method": ("model", "config"),
    "model_bound": ("plan",),
    "request_admitted": ("request",),
    "request_first_token": ("request", "elapsed"),
    "request_finished": ("request", "reason", "usage"),
    "request_failed": ("request", "error"),
    "request_preempted": ("request",),
    "step_finished": ("step",),
}


@pytest.fixture
def manager():
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def specs():
    return {name: value for name, value in vars(hookspecs).items() if hasattr(value, "oarlock_spec")}


def test_the_hooks_are_these_with_these_arguments(manager):
    """A hook that comes, goes or changes is a change of the public API."""
    assert {name: tuple(inspect.signature(spec).parameters) for name, spec in specs().items()} == HOOKS
    assert {name for name in vars(manager.hook) if not name.startswith("_")} == set(HOOKS)


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_says_when_it_is_called_or_what_it_returns(name):
    """Docstrings open with "Called when ..." or "Return ...", and every argument is annotated."""
    spec = specs()[name]
    assert spec.__doc__.startswith("Return " if name.startswith("choose_") else "Called when ")
    assert all(p.annotation is not p.empty for p in inspect.signature(spec).parameters.values())
    assert inspect.signature(spec).return_annotation is not inspect.Signature.empty


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_reaches_its_implementations(manager, name):
    """With all of its arguments; a choice is the first that is not None."""
    facts = {argument: object() for argument in HOOKS[name]}
    source = f"def {name}({', '.join(facts)}):\n    seen.append(({', '.join(facts)},))\n    return answer"
    seen = []
    for answer in ("first", None):  # the last one registered is asked first
        namespace = {"seen": seen, "answer": answer}
        exec(source, namespace)  # noqa: S102 - the implementation takes the arguments of its hook by name
        plugin = type("Plugin", (), {name: staticmethod(hookspecs.hookimpl(namespace[name]))})
        manager.register(plugin(), repr(answer))
    result = getattr(manager.hook, name)(**facts)
    assert seen == [tuple(facts.values())] * 2
    assert result == ("first" if name.startswith("choose_") else ["first"])


def test_each_registering_hook_has_a_registry_and_each_observer_is_listed():
    """`Registries.layouts` is filled by ``register_layouts``; what is neither registering nor choosing observes."""
    registering = [name for name in HOOKS if name.startswith("register_")]
    assert registering == [f"register_{attribute}" for attribute in Registries.__annotations__]
    rest = [name for name in HOOKS if not name.startswith(("register_", "choose_"))]
    assert tuple(rest) == hookspecs.OBSERVERS


def test_the_marker_and_the_number_are_public():
    """What a plugin needs: one import."""
    assert oarlock.core.hookimpl is hookspecs.hookimpl
    assert (hookspecs.PROJECT, hookspecs.OARLOCK_API) == ("oarlock", 1)
