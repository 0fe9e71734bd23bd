"""What random schedules have found, cut down to the fewest requests that still failed."""

from harness.plan import Plan
from harness.schedule import Script, play
from harness.world import Setting


def test_rows_that_are_built_again_stay_within_the_budget(tools):
    """A preparation and a running row become two running rows, which the budget has no room for."""
    play(
        Script(
            setting=Setting(
                scheduler={
                    "max_batch": 4,
                    "policy": "fair_share",
                    "prefill_chunk": 1,
                    "kv_budget": 768,
                    "overcommit": 5.0,
                },
                layers=2,
                losses=(12,),
            ),
            plans=(
                Plan(index=0, prompt=(0, 16), max_tokens=4, method="other"),
                Plan(index=1, prompt=(1, 11), max_tokens=14),
                Plan(index=2, prompt=(2, *range(20)), max_tokens=4),
            ),
            seed=884141841,
            cancels=3,
            without=frozenset({"cancel", "release", "hold", "cancel task", "close"}),
        ),
        tools,
    )


def test_a_kept_error_keeps_no_caches_of_its_callers(tools):
    """Two rows are guilty at once, and the frame that found both ends after one was settled with its error."""
    play(
        Script(
            setting=Setting(scheduler={"max_batch": 4, "policy": "fair_share"}),
            plans=(
                Plan(index=0, prompt=(0, 58, 13, 2, 57, 33)),
                Plan(index=2, prompt=(2, 10, 42), max_tokens=25, method="other", fault="poison", at=4),
                Plan(index=3, prompt=(3, 23, 13), max_tokens=2, method="other", fault="poison", at=4),
            ),
            seed=1022798772,
            cancels=3,
            without=frozenset({"cancel task", "cancel", "task", "hold", "close", "release"}),
        ),
        tools,
    )
