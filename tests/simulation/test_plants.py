"""Bugs planted in the engine, each of which the simulation must find: it would see them if they were there."""

from __future__ import annotations

import pytest
from harness.plan import Planned, Transient
from harness.schedule import run

from oarlock.core import driver
from oarlock.core.admission import AdmissionQueue
from oarlock.core.budget import Budget
from oarlock.core.driver import Driver
from oarlock.core.emission import Emitter
from oarlock.core.group import ExecutionGroup
from oarlock.core.mixed import Work
from oarlock.core.prefill import PrefillCohort
from oarlock.core.publication import Publisher
from oarlock.core.rebuild import Rebuild
from oarlock.core.recovery import Recovery
from oarlock.core.relief import Relief
from oarlock.core.row import Row
from oarlock.core.sampling import SamplerGroup
from oarlock.core.scheduler import Scheduler
from oarlock.core.states import state_key
from oarlock.layouts.full import FullCache
from oarlock.methods.plain import PlainDecoding, _join_all
from oarlock.plugins.policies import DecodeFirst

SCHEDULES = 2000


def adopts_before_the_flush(patch):
    """Trap 1: the flush can empty the batch."""

    def join(self, row, caches, first=None):
        empty = not self._host.rows
        self.flush()
        if empty:
            self._caches, self._register = list(caches), first
        else:
            _join_all(self._caches, caches, len(self._host.rows))

    patch.setattr(ExecutionGroup, "flush", lambda self: None)
    patch.setattr(PlainDecoding, "join", join)


def register_is_not_filtered_with_the_rows(patch):
    """Trap 7."""

    def keep(self, indices, discard):
        if not indices:
            return self.abort()
        for cache in self._caches:
            cache.keep(indices)
        return None

    patch.setattr(PlainDecoding, "keep", keep)


def cold_steps_feed_nothing(patch):
    """Trap 5: a cold step feeds each row's current token."""
    advance = PlainDecoding.advance

    def forgetful(self, work=None):
        cold = self._register is None
        fed = {row.id: len(row.fed) for row in self._host.rows}
        advance(self, work)
        for row in self._host.rows:
            if cold and len(row.fed) > fed[row.id]:
                row.fed.pop()

    patch.setattr(PlainDecoding, "advance", forgetful)


def flushed_tokens_are_fed(patch):
    """Trap 5: they are fed later, as the current token."""
    emit = PlainDecoding._emit
    patch.setattr(PlainDecoding, "_emit", lambda self, register, *, fed: emit(self, register, fed=True))


def doomed_rows_are_sampled(patch):
    """8.4: a row whose last token is drawn already is sampled no more."""
    patch.setattr(Row, "live", property(lambda self: True))


def caches_keep_another_order_than_rows(patch):
    """7.8."""
    keep = PlainDecoding.keep
    patch.setattr(PlainDecoding, "keep", lambda self, indices, discard: keep(self, indices[::-1], discard))


def rows_settle_twice(patch):
    """2.4, trap 14."""
    conclude = Emitter.conclude

    def again(self, row):
        conclude(self, row)
        row.outcome = None
        return conclude(self, row)

    patch.setattr(Emitter, "conclude", again)


def cancels_are_ignored_while_preparing(patch):
    """2.5 (b), trap 40."""
    patch.setattr(PrefillCohort, "_drop_cancelled", lambda self: None)


def the_lock_is_released_between_steps(patch):
    """3.4, trap 43."""
    decode = Driver.decode

    def careless(self):
        decode(self)
        self.release()

    patch.setattr(Driver, "decode", careless)


def decode_is_skipped_after_publishing(patch):
    """DESIGN 6: the promise of decode_first."""
    patch.setattr(DecodeFirst, "ends_after_preparation", lambda self, counts: counts.published)


def end_tokens_are_not_counted(patch):
    """10.3, trap 10."""
    emit = Emitter.emit

    def emitting(self, row, drawn):
        before = row.reason
        goes_on = emit(self, row, drawn)
        row.generated -= before is None and row.reason is not None and drawn.token in row.stop_ids
        return goes_on

    patch.setattr(Emitter, "emit", emitting)


def failed_rows_are_published(patch):
    """13.7, trap 15."""
    retire = ExecutionGroup.retire

    def publishing(self):
        for place, row in enumerate(self._rows):
            if row.error is not None and self._method is not None:
                states = [cache.extract(place) for cache in self._method.caches()]
                self.states.store.publish(state_key(self.bound, row), row.coverage, states)
        retire(self)

    patch.setattr(ExecutionGroup, "retire", publishing)


def aborted_forwards_leave_a_token(patch):
    """DESIGN 7.3: commit with zeros undoes a forward that raised."""
    commit = FullCache.commit
    patch.setattr(FullCache, "commit", lambda self, kept: commit(self, kept if any(kept) else [1] * len(kept)))


def keys_know_the_place_of_a_row(patch):
    """9.4: draws depend on seed and position alone."""
    keys = SamplerGroup._keys
    patch.setattr(SamplerGroup, "_keys", lambda self: keys(self)[::-1])


def leases_are_kept(patch):
    """2.4: settling gives the lease back."""
    patch.setattr(Driver, "conclude", lambda self, row: self.emitter.conclude(row))


def held_engines_admit(patch):
    """3.3, trap 44."""
    patch.setattr(
        Scheduler, "_room", lambda self, work: work.queued and work.active + work.preparing_rows < self.max_batch
    )


def the_last_comes_first(patch):
    """4.1."""
    patch.setattr(AdmissionQueue, "head", lambda self: list(self)[-1] if len(self) else None)


def the_first_row_is_to_blame(patch):
    """DESIGN 7.3: only the guilty row is rejected."""
    patch.setattr(Recovery, "isolate", lambda self, failure: {0: failure.cause})


def steps_are_not_tried_again(patch):
    """DESIGN 7.3: an error that does not come back costs nobody anything."""
    attempt = Recovery._attempt

    def impatient(self, step, rows, repeated):
        failed = attempt(self, step, rows, None)
        return failed and (failed[0], {0: RuntimeError()})

    patch.setattr(Recovery, "_attempt", impatient)


def chunks_that_were_taken_along_are_done_again(patch):
    """8.9: the preparation goes on from the step's logits."""
    patch.setattr(Work, "take_back", lambda self: None)


def failed_mixed_forwards_leave_the_chunk(patch):
    """8.11: both sides unwind."""
    along = Work.along

    def forgetful(self, *given):
        side = self._side
        try:
            return along(self, *given)
        except Exception:
            for cache in side.caches:
                cache.commit(side.widths)
            raise

    patch.setattr(Work, "along", forgetful)


def preempted_rows_lose_a_token(patch):
    """DESIGN 7.5: they are computed again from everything that was delivered."""
    put_back = Driver._put_back

    def forgetful(self, row):
        if row.token_ids:
            row.token_ids.pop()
            row.generated -= 1
        put_back(self, row)

    patch.setattr(Driver, "_put_back", forgetful)


def preempted_rows_are_forgotten(patch):
    """DESIGN 7.5: they come back."""
    patch.setattr(Driver, "_put_back", lambda self, row: self._store.release(row, False))


def the_budget_is_not_kept(patch):
    """4.7: before each step."""
    patch.setattr(Budget, "relieves", lambda *_: True)


def everybody_is_afforded(patch):
    """4.5: and the joiner beside those that run."""
    patch.setattr(Budget, "admits", lambda *_: True)
    patch.setattr(Relief, "relieve", lambda self, preparation: preparation)


def rebuilt_rows_draw_with_another_position(patch):
    """DESIGN 7.4: draws go on as they would have."""
    restart = Row.restart

    def restarting(self):
        restart(self)
        self.sampled += self.generated > 0

    patch.setattr(Row, "restart", restarting)


def a_rebuild_emits_the_last_token_again(patch):
    """DESIGN 7.4: nothing is emitted twice."""
    patch.setattr(Row, "known_ids", property(lambda self: (*self.prompt_ids, *self.token_ids[:-1])))


def the_guilty_row_is_acquitted(patch):
    """DESIGN 7.4: it fails with its own error."""
    prove = Rebuild._prove

    def lenient(self, rows):
        if len(rows) > 1:
            return prove(self, rows)
        self._set_apart()
        return True

    patch.setattr(Rebuild, "_prove", lenient)


def only_halves_are_tried(patch):
    """DESIGN 7.4: halving goes down to single rows."""

    def prove(self, rows):
        again = self._try(rows)
        if again is not None:
            self._reject([row for row in rows if not row.over], again)
        return again is None

    patch.setattr(Rebuild, "_prove", prove)


def what_the_device_says_is_not_heard(patch):
    """DESIGN 7.4: what was dispatched and not read is not believed."""
    emit = PlainDecoding._emit

    def deaf(self, register, *, fed):
        try:
            emit(self, register, fed=fed)
        except (Planned, Transient):
            emit(self, register, fed=fed)

    patch.setattr(PlainDecoding, "_emit", deaf)


def a_state_is_stored_before_its_last_step_was_read(patch):
    """DESIGN 7.4: what the device has not answered for is not stored."""
    hold = Publisher.hold

    def at_once(self, row, tokens, states):
        hold(self, row, tokens, states)
        self.settle()

    patch.setattr(Publisher, "hold", at_once)


def the_budget_is_forgotten_in_a_rebuild(patch):
    """4.7: rows that are built again are rows of a group like others."""
    patch.setattr(Budget, "rebuilds", lambda self, rows: True)


def the_first_error_ends_the_cleaning(patch):
    """DESIGN 7.8: all clean-up is attempted."""

    def attempt(attempts):
        for each in attempts:
            each()

    patch.setattr(driver, "attempt_all", attempt)


PLANTS = [
    adopts_before_the_flush,
    register_is_not_filtered_with_the_rows,
    cold_steps_feed_nothing,
    flushed_tokens_are_fed,
    doomed_rows_are_sampled,
    caches_keep_another_order_than_rows,
    rows_settle_twice,
    cancels_are_ignored_while_preparing,
    the_lock_is_released_between_steps,
    decode_is_skipped_after_publishing,
    end_tokens_are_not_counted,
    failed_rows_are_published,
    aborted_forwards_leave_a_token,
    keys_know_the_place_of_a_row,
    leases_are_kept,
    held_engines_admit,
    the_last_comes_first,
    the_first_row_is_to_blame,
    steps_are_not_tried_again,
    chunks_that_were_taken_along_are_done_again,
    failed_mixed_forwards_leave_the_chunk,
    preempted_rows_lose_a_token,
    preempted_rows_are_forgotten,
    the_budget_is_not_kept,
    everybody_is_afforded,
    rebuilt_rows_draw_with_another_position,
    a_rebuild_emits_the_last_token_again,
    the_guilty_row_is_acquitted,
    only_halves_are_tried,
    what_the_device_says_is_not_heard,
    a_state_is_stored_before_its_last_step_was_read,
    the_budget_is_forgotten_in_a_rebuild,
    the_first_error_ends_the_cleaning,
]


LONGER = {the_budget_is_forgotten_in_a_rebuild}
"""Found after a minute of schedules."""


@pytest.mark.parametrize(
    "plant",
    [pytest.param(plant, marks=pytest.mark.long if plant in LONGER else ()) for plant in PLANTS],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_bug_is_found(plant, tools, monkeypatch):
    """Each within 2,000 schedules; without it the same schedules pass, see test_schedules."""
    plant(monkeypatch)
    for number in range(SCHEDULES):
        try:
            run(number, tools)
        except AssertionError as found:
            print(f"\n{plant.__name__}: schedule {number}: {str(found)[:160]}")
            return
    pytest.fail(f"{plant.__name__} was not found by {SCHEDULES} schedules")
