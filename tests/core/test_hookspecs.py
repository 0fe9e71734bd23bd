"""The hooks: names, arguments and first words are public. Each hook is called once here as its user would see it."""

import inspect
import types

import pluggy
import pytest

import oarlock.core
from oarlock.core import hookspecs, manager
from oarlock.core.observe import Observers
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


def specs():
    return {name: value for name, value in vars(hookspecs).items() if hasattr(value, "oarlock_spec")}


def test_the_hooks_are_these_with_these_arguments():
    """A hook that comes, goes or changes is a change of the public API."""
    known = pluggy.PluginManager(hookspecs.PROJECT)
    known.add_hookspecs(hookspecs)
    assert {name: tuple(inspect.signature(spec).parameters) for name, spec in specs().items()} == HOOKS
    assert {name for name in vars(known.hook) if not name.startswith("_")} == set(HOOKS)


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_says_when_it_is_called_or_what_it_returns(name):
    """Docstrings open with "Called when ..." or "Return ...", and every argument is annotated."""
    spec = specs()[name]
    assert spec.__doc__.startswith("Return " if name.startswith("choose_") else "Called when ")
    assert all(p.annotation is not p.empty for p in inspect.signature(spec).parameters.values())
    assert inspect.signature(spec).return_annotation is not inspect.Signature.empty


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


# --- each hook, through the door that plugins use ---------------------------------------------------------


def plugins(**hooks):
    """Build the manager with one plugin a hook implementation."""
    passed = []
    for hook, functions in hooks.items():
        for function in functions:
            passed.append(types.ModuleType("plugin"))
            setattr(passed[-1], hook, hookspecs.hookimpl(function))
    return manager.build(plugins=passed, disable=["oarlock"])


def registers(attribute):
    """What is registered comes back from its registry, from every plugin that implements the hook."""
    contract = getattr(Registries(), attribute).contract
    members = dict.fromkeys([*getattr(contract, "__annotations__", ()), *vars(contract or object)], None)
    items = [types.SimpleNamespace(**{**members, "name": name}) for name in ("first", "second", "third")]

    def both(register):
        register(items[0])
        register(items[1])

    found = plugins(**{f"register_{attribute}": [both, lambda register: register(items[2])]})
    assert list(getattr(found.registries, attribute)) == items
    assert found.resolve(getattr(found.registries, attribute).kind, "third") is items[2]


def chooses(hook, **facts):
    """The first answer that is not None, of the plugin that came last; None where nobody answers."""

    def choose(seen, answer):
        source = f"lambda {', '.join(facts)}: seen.append(({', '.join(facts)},)) or answer"
        return eval(source, {"seen": seen, "answer": answer})  # noqa: S307 - arguments are passed by their names

    seen = []
    found = plugins(**{hook: [choose(seen, "never asked"), choose(seen, "chosen"), choose(seen, None)]})
    assert getattr(found.manager.hook, hook)(**facts) == "chosen"
    assert seen == [tuple(facts.values())] * 2
    assert getattr(plugins(**{hook: [choose(seen, None)]}).manager.hook, hook)(**facts) is None


def observes(hook, **facts):
    """Every implementation is told, with every argument under its name."""
    seen = []
    source = f"lambda {', '.join(facts)}: seen.append(({', '.join(facts)},))"
    observer = [eval(source, {"seen": seen}) for _ in range(2)]  # noqa: S307 - arguments are passed by their names
    Observers(plugins(**{hook: observer}).manager).notify(hook, **facts)
    assert seen == [tuple(facts.values())] * 2


def test_hook_register_layouts():
    registers("layouts")


def test_hook_register_methods():
    registers("methods")


def test_hook_register_proposers():
    registers("proposers")


def test_hook_register_samplers():
    registers("samplers")


def test_hook_register_processors():
    registers("processors")


def test_hook_register_constraints():
    registers("constraints")


def test_hook_register_policies():
    registers("policies")


def test_hook_register_adapters():
    registers("adapters")


def test_hook_register_loaders():
    registers("loaders")


def test_hook_register_state_caches():
    registers("state_caches")


def test_hook_register_commands():
    registers("commands")


def test_hook_choose_layout():
    chooses("choose_layout", layer="layer", model="model")


def test_hook_choose_method():
    chooses("choose_method", model="model", config="config")


def test_hook_model_bound():
    observes("model_bound", plan="plan")


def test_hook_request_admitted():
    observes("request_admitted", request="request")


def test_hook_request_first_token():
    observes("request_first_token", request="request", elapsed=0.5)


def test_hook_request_finished():
    observes("request_finished", request="request", reason="stop", usage="usage")


def test_hook_request_failed():
    observes("request_failed", request="request", error=ValueError())


def test_hook_request_preempted():
    observes("request_preempted", request="request")


def test_hook_step_finished():
    observes("step_finished", step="step")
