"""What is written in benchmarks of drafts: texts that say again what stands before them, and texts that do not.

Chosen so that SmolLM2-135M-Instruct answers them greedily with at least `TOKENS` tokens, of which none are a loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

TOKENS = 88
"""Of every answer."""
SHORTEST_PERIOD = 32
"""What repeats itself sooner is a loop: drafts of it are no achievement."""
LEAST_REPEATED = 8
"""So many tokens must be repeated for a loop of a shorter period."""

REPETITIVE: Mapping[str, str] = {
    "rename": """\
Rename the variable total to amount in this Python code. Write the whole code again:

```python
def total_price(items, tax_rate):
    total = 0
    for item in items:
        price = item["price"] * item["count"]
        if item["discount"] > 0:
            price = price - price * item["discount"]
        total = total + price
    tax = total * tax_rate
    return total + tax
```""",
    "docstring": """\
Add a docstring to every method of this Python class. Write the whole class again:

```python
class Boat:
    def __init__(self, name, seats):
        self.name = name
        self.seats = seats
        self.crew = []

    def board(self, rower):
        if len(self.crew) >= self.seats:
            raise ValueError("the boat is full")
        self.crew.append(rower)

    def is_ready(self):
        return len(self.crew) == self.seats
```""",
    "default": """\
Change the default port to 9090 in this JavaScript code and write the whole code again:

```js
function readConfig(path) {
  const text = fs.readFileSync(path, "utf8");
  const config = JSON.parse(text);
  if (!config.host) {
    throw new Error("host is missing in " + path);
  }
  if (!config.port) {
    config.port = 8080;
  }
  return config;
}
```""",
    "table": """\
Here is a table:

Name, Country, Length (km), Mouth
Danube, ten countries, 2850, Black Sea
Rhine, six countries, 1233, North Sea
Loire, France, 1006, Atlantic Ocean
Elbe, Germany and Czechia, 1094, North Sea
Po, Italy, 652, Adriatic Sea
Tagus, Spain and Portugal, 1007, Atlantic Ocean

Write the table again, with one more column for the continent.""",
    "letter": """\
Correct the spelling of this letter and write the whole letter again:

Dear Ms. Okafor,

thank you for your letter of 12 March. We have checked the invoice number 20418 and found that the amount of 318.50 euros was charged twice. The second amount will be returned to your account at Nordbank within ten working days. Please keep this letter together with your order number 77-1032.

With kind regards,
Henrik Solberg, customer service""",
    "minutes": """\
Correct the spelling of these minutes and write the whole text again:

The committee met on 4 May in the old boathouse. Present were Anna Brandt, Luis Ferreira, Mei Tanaka and Ola Nyquist. The treasurer reported that the new oars had cost 2,340 euros, and that 410 euros are left. Luis Ferreira proposed to paint the landing stage in June. The proposal was accepted with three votes to one. The next meeting will be held on 8 June at seven in the evening.""",
    "class": """\
Rename the method board to embark in this Python class. Write the whole class again:

```python
class Boat:
    def __init__(self, name, seats):
        self.name = name
        self.seats = seats
        self.crew = []

    def board(self, rower):
        if len(self.crew) >= self.seats:
            raise ValueError("the boat is full")
        self.crew.append(rower)

    def is_ready(self):
        return len(self.crew) == self.seats
```""",
    "json": """\
Change the port to 9090 in this JSON file and write the whole file again:

```json
{
  "name": "oarlock",
  "host": "127.0.0.1",
  "port": 8080,
  "workers": [
    {"id": 1, "role": "reader", "limit": 200},
    {"id": 2, "role": "writer", "limit": 50}
  ],
  "log": {"level": "info", "file": "/var/log/oarlock.log"}
}
```""",
}
"""Code edited, and texts and tables written again."""

FREE: Mapping[str, str] = {
    "harbour": "Describe a fishing harbour early in the morning.",
    "sky": "Why is the sky blue during the day and red in the evening?",
    "letter": "Write a letter to a friend about a journey by train through the mountains.",
    "bread": "How is bread made? Explain it to a child.",
    "story": "Tell a short story about a lighthouse keeper who finds a message in a bottle.",
    "advice": "I want to learn to play the violin at the age of forty. What do you advise?",
    "history": "What changed in the daily life of people when electric light came to the cities?",
    "garden": "Plan a small garden for a balcony that gets sun only in the afternoon.",
}
"""Nothing of the answer stands in the question."""


def loop(tokens: Sequence[int]) -> int:
    """Return the shortest period below `SHORTEST_PERIOD` with which ``tokens`` repeat themselves anywhere, 0 where they do not."""
    for period in range(1, SHORTEST_PERIOD):
        repeated = 0
        for before, token in zip(tokens, tokens[period:], strict=False):
            repeated = repeated + 1 if token == before else 0
            if repeated >= max(period, LEAST_REPEATED):
                return period
    return 0
