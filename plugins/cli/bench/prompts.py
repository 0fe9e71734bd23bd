"""What is read in benchmarks: one text, begun at different places. It loads no model."""

from __future__ import annotations

from collections.abc import Sequence

from oarlock.core.contracts.loader import Tokenizer

TEXT = (
    "A rowing boat is moved by oars that turn in oarlocks. The lock holds the oar where the boat is widest, and so the "
    "rower's pull becomes a push on the water. In an eight every rower has one oar, four on each side, and a ninth "
    "person steers and calls the stroke. Rivers were crossed like this long before there were bridges. A good crew is "
    "not eight strong people; it is one long movement. When the blades enter the water at the same moment, the hull "
    "lifts a little and runs. When they do not, each stroke stops what the last one began. Coaches watch the puddles: "
    "evenly spaced, they say that the boat ran well between the strokes. Wind from ahead shortens the run, a following "
    "wind lengthens it, and a cross wind makes the steering heavy. On a lake the water is flat in the morning. By noon "
    "the thermals have made waves, and the smaller boats go home. What remains is the sound of the slides, the knock "
    "of the gates and the water under the hull, which rowers call singing."
)


def prompts(tokenizer: Tokenizer | None, vocabulary: int, lengths: Sequence[int]) -> list[list[int]]:
    """Return one prompt of each length, each from another place of the text; without a tokenizer, of made-up tokens."""
    if tokenizer is None:
        return [[(7 * row + 3 * i) % vocabulary for i in range(n)] for row, n in enumerate(lengths)]
    ids = list(tokenizer.encode(TEXT))
    around = ids * (2 + max(lengths) // len(ids))
    places = [len(ids) * row // len(lengths) for row in range(len(lengths))]
    return [around[start : start + n] for start, n in zip(places, lengths, strict=True)]
