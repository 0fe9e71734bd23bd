"""Many clients at once, some of whom hang up or send nonsense: every answer is complete or was given up, nothing else.

Run alone for as long as wanted: ``python tests/plugins/server/load.py smollm2 --seconds 600``. It prints how long first
tokens took and what memory did, and exits with 1 where anything was not as it should be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

import attrs
import httpx

NONSENSE = [
    b"",
    b"{",
    b"[]",
    b'{"model": "nobody"}',
    b'{"messages": 5}',
    b"\xff" * 50,
    b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "n": -1}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": "warm"}',
]
WORDS = ["rows", "rivers", "oars", "locks", "boats", "banks", "weirs", "tides"]


@attrs.define
class Load:
    """What happened. Times are seconds."""

    url: str
    model: str
    path: str = "/v1/chat/completions"
    counts: Counter[str] = attrs.field(factory=Counter)
    firsts: list[float] = attrs.field(factory=list)
    wrong: list[str] = attrs.field(factory=list)

    async def run(self, clients: int, seconds: float) -> None:
        """Let so many clients ask for so long, then until their last answers are in."""
        until = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=clients * 2)
        async with httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits, trust_env=False) as wire:
            await asyncio.gather(*[self._client(wire, random.Random(seed), until) for seed in range(clients)])

    async def _client(self, wire: httpx.AsyncClient, dice: random.Random, until: float) -> None:
        while time.monotonic() < until:
            kind = dice.choices(["stream", "whole", "hang up", "nonsense"], [4, 2, 3, 1])[0]
            try:
                await getattr(self, f"_{kind.replace(' ', '_')}")(wire, dice)
                self.counts[kind] += 1
            except (httpx.HTTPError, AssertionError, KeyError, ValueError) as error:
                self.wrong.append(f"{kind}: {type(error).__name__}: {error}"[:300])

    def _body(self, dice: random.Random, **fields) -> dict:
        prompt = " ".join(dice.choices(WORDS, k=dice.choice([2, 10, 60])))
        sampling = {"temperature": dice.choice([0, 0.8]), "seed": dice.randrange(1000), "n": dice.choice([1, 1, 1, 2])}
        messages = [{"role": "user", "content": prompt}]
        return {"model": self.model, "messages": messages, "max_tokens": dice.randint(1, 24), **sampling, **fields}

    async def _stream(self, wire, dice):
        body, begun, ended, done = self._body(dice, stream=True), time.monotonic(), 0, False
        async with wire.stream("POST", self.path, json=body) as answer:
            if await self._busy(answer):
                return
            seen = False
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line:
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    ended += choice["finish_reason"] in {"stop", "length"}
                    if choice["delta"].get("content") and not seen:
                        seen = True
                        self.firsts.append(time.monotonic() - begun)
        assert done, "the stream has no end"
        assert ended == body["n"], f"{ended} reasons for {body['n']} choices"

    async def _whole(self, wire, dice):
        body = self._body(dice)
        answer = await wire.post(self.path, json=body)
        if await self._busy(answer):
            return
        read = answer.json()
        assert len(read["choices"]) == body["n"]
        assert read["usage"]["completion_tokens"] <= body["max_tokens"] * body["n"]

    async def _hang_up(self, wire, dice):
        body = self._body(dice, stream=dice.random() < 0.5, max_tokens=400, ignore_eos=True)
        asking = asyncio.create_task(self._read(wire, body))
        await asyncio.wait({asking}, timeout=dice.random() * 0.5)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    async def _read(self, wire, body):
        async with wire.stream("POST", self.path, json=body) as answer:
            await answer.aread()

    async def _nonsense(self, wire, dice):
        answer = await wire.post(self.path, content=dice.choice(NONSENSE), headers={"content-type": "application/json"})
        assert answer.status_code in {400, 404}, f"status {answer.status_code}"
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    async def _busy(self, answer) -> bool:
        """Return whether the queue was full, and wait as long as one is asked to. Any other refusal is wrong."""
        if answer.status_code == 429:
            self.counts["asked to come again"] += 1
            await asyncio.sleep(float(answer.headers["retry-after"]) / 4)
            return True
        assert answer.status_code == 200, f"status {answer.status_code}"
        return False

    def report(self) -> str:
        """Return one line of what happened."""
        ordered = sorted(self.firsts) or [0.0]
        at = {name: ordered[round(share * (len(ordered) - 1))] for name, share in (("p50", 0.5), ("p99", 0.99))}
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        return f"{kinds}; first token p50 {at['p50']:.3f} s, p99 {at['p99']:.3f} s; wrong {len(self.wrong)}"


def resident(process: int | str = "self") -> int:
    """Return the resident bytes of a process."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * 4096


async def watched(load: Load, clients: int, seconds: float, memory) -> tuple[int, int]:
    """Run the load; return the most resident bytes over its second sixth, and over its last: warm, and at the end."""
    seen: list[tuple[float, int]] = []
    begun = time.monotonic()

    async def look():
        while True:
            seen.append(((time.monotonic() - begun) / seconds, memory()))
            await asyncio.sleep(0.2)

    looking = asyncio.create_task(look())
    await load.run(clients, seconds)
    looking.cancel()
    early = [size for share, size in seen if 1 / 6 <= share < 1 / 3]
    late = [size for share, size in seen if share >= 5 / 6]
    return max(early), max(late)


def main() -> None:
    """Start a server, load it, and print what happened."""
    import re
    import subprocess

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=32)
    given = parser.parse_args()
    program = "from oarlock.plugins.cli import main; main()"
    options = ["--name", "tiny", "--port", "0", "--set", "state_cache.prefix_bytes=64MiB"]
    command = [sys.executable, "-c", program, "serve", given.model, *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            url = next(found[1] for line in server.stderr if (found := re.search(r"page at (\S+)/", line)))
            load = Load(url, "tiny")
            early, late = asyncio.run(watched(load, given.clients, given.seconds, lambda: resident(server.pid)))
        finally:
            server.terminate()
    print(load.report())
    print(f"resident memory: {early / 2**20:.0f} MiB warm, {late / 2**20:.0f} MiB at the end ({late / early - 1:+.1%})")
    print(f"exit code of the server: {server.returncode}")
    print("\n".join(load.wrong[:10]))
    sys.exit(1 if load.wrong or server.returncode else 0)


if __name__ == "__main__":
    main()
