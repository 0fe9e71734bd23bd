"""The conformance kit for decoding methods: whole engines on tiny models, against mlx-lm's own serial generation.

    class TestMine(MethodContract):
        method = MyMethod()
        options = {"depth": 3}

in a test file, or ``pytest --oarlock-method NAME`` for one that is installed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from oarlock.core.choices import parse_options
from oarlock.core.contracts.method import Method
from oarlock.core.engine import Engine
from oarlock.core.handle import Handle
from oarlock.core.request import Request, SamplingParams
from oarlock.core.result import FinishReason, TokenEvent
from oarlock.core.testing import models
from oarlock.core.testing.memory import SMALL, active_bytes
from oarlock.core.testing.subjects import arguments, name_of, resolved

__all__ = ["MethodContract"]

LENGTHS = (12, 3, 7, 1, 9)
TOKENS = 24
SMALLER: Mapping[str, Mapping[str, Any]] = {
    "lfm2": {"hidden_size": 128, "block_dim": 128, "block_ff_dim": 256, "vocab_size": 1000}
}
MOST_STEPS = 30 * TOKENS


class MethodContract:
    """What a method promises, clause by clause; subclass it, name a ``method``, and let pytest find the subclass.

    ``models``: the tiny models that it runs on, names of `models.table`. Greedy tokens are those of mlx-lm's serial
    generation, whatever the method does to get them.
    """

    method: ClassVar[Method | str]
    options: ClassVar[Mapping[str, Any]] = {}
    models: ClassVar[Sequence[str]] = ("tiny-full", "tiny-ring", "lfm2")

    @classmethod
    def check_subject(cls) -> None:
        """Raise what makes it impossible to begin."""
        parse_options(resolved("method", cls.method).options, cls.options, "method")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Try every clause that asks for one on every model."""
        if "model" in metafunc.fixturenames:
            metafunc.parametrize("model", self.models)

    def engine(self, model: str, **scheduler: Any) -> Engine:
        """Return an engine of which the method is the own one."""
        plugins, disable = arguments("method", self.method)
        config = {
            "scheduler": scheduler,
            "method": {"name": name_of(self.method), **self.options},
            "plugins": {"disable": disable},
        }
        return Engine(_model(model), config=config, plugins=plugins)

    @pytest.mark.parametrize("settings", [{}, {"prefill_chunk": 4}, {"pipeline": False}, {"max_batch": 1}], ids=str)
    def test_greedy_tokens_are_the_serial_ones(self, model: str, settings: dict[str, Any]) -> None:
        """Ragged prompts at once; nothing had to be recovered."""
        with self.engine(model, **settings) as engine:
            results = _run(engine, [_request(row) for row in range(len(LENGTHS))])
            assert engine.stats()["recoveries"] == 0
        _compare(model, [list(result.token_ids) for result in results])
        assert {result.finish_reason for result in results} == {FinishReason.LENGTH}
        assert [result.usage.prompt_tokens for result in results] == list(LENGTHS)
        assert {result.usage.generated_tokens for result in results} == {TOKENS}

    @pytest.mark.parametrize("every", [1, 3])
    def test_rows_join_and_leave_while_others_run(self, model: str, every: int) -> None:
        """Each has its own limit and comes some steps after the one before; two at most run together."""
        limits = (TOKENS, 2, 9, 1, 5)
        with self.engine(model, max_batch=2) as engine:
            handles = []
            for row, limit in enumerate(limits):
                handles.append(engine.submit(_request(row, max_tokens=limit)))
                for _ in range(every):
                    engine.step()
            results = _results(engine, handles)
            assert engine.stats()["recoveries"] == 0
        _compare(model, [list(result.token_ids) for result in results], limits)

    def test_seeded_rows_do_not_mind_their_company(self, model: str) -> None:
        """Sampled tokens are those of the same request alone."""
        sampling = [SamplingParams(temperature=1.0, top_p=0.9, seed=seed) for seed in range(len(LENGTHS))]
        requests = [_request(row, sampling=params) for row, params in enumerate(sampling)]
        with self.engine(model) as engine:
            together = [result.token_ids for result in _run(engine, requests)]
        for request, tokens in zip(requests, together, strict=True):
            with self.engine(model) as engine:
                (alone,) = _run(engine, [request])
            assert alone.token_ids == tokens

    def test_processors_know_every_token_that_was_drawn(self, model: str) -> None:
        """A penalty that forbids every token of the answer: none comes twice, whoever joins, leaves and asks for nothing."""
        once = SamplingParams(presence_penalty=1e6)
        limits = (TOKENS, 3, 9, TOKENS, 5)
        with self.engine(model, max_batch=3) as engine:
            handles = []
            for row, limit in enumerate(limits):
                sampling = SamplingParams() if row == 2 else once
                handles.append(engine.submit(_request(row, max_tokens=limit, sampling=sampling)))
                engine.step()
            results = _results(engine, handles)
        for row in (0, 1, 3, 4):
            tokens = results[row].token_ids
            assert len(tokens) == len(set(tokens)) == limits[row]
        _compare(model, [list(results[2].token_ids)], [limits[2]], rows=[2])

    def test_events_are_the_tokens_once_and_in_order(self, model: str) -> None:
        """What a consumer was told is what the result holds."""
        seen: list[list[int]] = [[] for _ in LENGTHS]

        def told(row: int) -> Any:
            def each(event: TokenEvent) -> None:
                if event.token is not None:
                    seen[row].append(event.token)

            return each

        with self.engine(model) as engine:
            results = _run(engine, [_request(row, on_token=told(row)) for row in range(len(LENGTHS))])
        assert seen == [list(result.token_ids) for result in results]

    def test_a_stop_token_ends_its_row_alone(self, model: str) -> None:
        """At the token itself, though steps were built beyond it."""
        serial = _serial(model, 0).tokens
        stop = serial[6]
        with self.engine(model) as engine:
            requests = [_request(0, stop_token_ids=(stop,)), _request(1)]
            first, second = _run(engine, requests)
        assert first.finish_reason == FinishReason.STOP
        assert len(first.token_ids) <= 7
        assert list(first.token_ids) == list(serial[: len(first.token_ids)])
        _compare(model, [list(second.token_ids)], rows=[1])

    def test_a_cancelled_row_keeps_what_it_has(self, model: str) -> None:
        """The others go on to their end."""
        with self.engine(model) as engine:
            handles = [engine.submit(_request(row)) for row in range(3)]
            for _ in range(8):
                engine.step()
            handles[1].cancel()
            results = _results(engine, handles)
        assert results[1].finish_reason == FinishReason.CANCELLED
        got = list(results[1].token_ids)
        assert got == list(_serial(model, 1).tokens[: len(got)])
        _compare(model, [list(results[row].token_ids) for row in (0, 2)], rows=[0, 2])

    def test_a_consumer_that_raises_ends_its_row_alone(self, model: str) -> None:
        """With its own error."""

        def angry(event: TokenEvent) -> None:
            if event.index == 3:
                msg = "no more of this"
                raise LookupError(msg)

        with self.engine(model) as engine:
            requests = [_request(row, on_token=angry if row == 1 else None) for row in range(3)]
            results = _run(engine, requests)
        assert "no more of this" in str(results[1])
        _compare(model, [list(results[row].token_ids) for row in (0, 2)], rows=[0, 2])

    def test_a_forward_that_fails_is_repeated(self, model: str) -> None:
        """An error while a step is built costs no row anything."""
        with self.engine(model, verify=False) as engine:
            flaky = _Flaky(engine.bound.model)
            object.__setattr__(engine.bound, "model", flaky)
            handles = [engine.submit(_request(row)) for row in range(3)]
            steps = 0
            while not all(handle.done for handle in handles) and steps < MOST_STEPS:
                flaky.fails = steps == 6
                engine.step()
                steps += 1
            results = _results(engine, handles)
        assert flaky.failed == 1
        _compare(model, [list(result.token_ids) for result in results], rows=[0, 1, 2])

    def test_an_engine_goes_on_when_it_was_idle(self, model: str) -> None:
        """Rows come again after all have left."""
        with self.engine(model) as engine:
            for _ in range(2):
                results = _run(engine, [_request(row) for row in (0, 2)])
                _compare(model, [list(result.token_ids) for result in results], rows=[0, 2])

    def test_everything_is_released(self, model: str) -> None:
        """When the engine is closed no bytes are left of its rows."""

        def live() -> None:
            with self.engine(model) as engine:
                _run(engine, [_request(row) for row in range(3)])

        live()
        before = active_bytes()
        live()
        assert active_bytes() - before <= SMALL


class _Flaky:
    """A model whose next forward raises once ``fails`` is set."""

    def __init__(self, model: Any) -> None:
        self._model, self.fails, self.failed = model, False, 0

    def __call__(self, *given: Any, **named: Any) -> Any:
        if self.fails:
            self.fails, self.failed = False, self.failed + 1
            msg = "the forward failed"
            raise RuntimeError(msg)
        return self._model(*given, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@functools.lru_cache(maxsize=8)
def _model(name: str) -> Any:
    return models.build(name, **SMALLER.get(name, {}))


@functools.lru_cache(maxsize=64)
def _serial(name: str, row: int) -> models.Serial:
    return models.serial(_model(name), _prompt(row), TOKENS)


def _run(engine: Engine, requests: Sequence[Request]) -> list[Any]:
    return _results(engine, [engine.submit(request) for request in requests])


def _results(engine: Engine, handles: Sequence[Handle]) -> list[Any]:
    """Drive until all have ended, and return results, or errors in their place."""
    for _ in range(MOST_STEPS):
        if all(handle.done for handle in handles):
            return [_outcome(handle) for handle in handles]
        engine.step()
    msg = f"requests {[i for i, handle in enumerate(handles) if not handle.done]} run on after {MOST_STEPS} steps"
    raise AssertionError(msg)


def _outcome(handle: Handle) -> Any:
    try:
        return handle.result()
    except Exception as error:  # noqa: BLE001 - it is what the clause looks at
        return error


def _prompt(row: int) -> list[int]:
    return models.prompts(LENGTHS, 97)[row]


def _request(row: int, **changes: Any) -> Request:
    return Request(**{"prompt_ids": _prompt(row), "max_tokens": TOKENS, **changes})


def _compare(
    model: str, got: Sequence[Sequence[int]], limits: Sequence[int] | None = None, rows: Sequence[int] | None = None
) -> None:
    serial = [_serial(model, row) for row in (range(len(got)) if rows is None else rows)]
    counts = limits or [TOKENS] * len(got)
    wanted = [row.tokens[:n] for row, n in zip(serial, counts, strict=True)]
    models.compare(got, wanted, [row.gaps[:n] for row, n in zip(serial, counts, strict=True)]).check()
