"""The built-in benchmark prompts, and reading others from a file.

Four each of chat, code and math, from one line to a page, because drafts are accepted most in code and least in free
text. Each carries all that is needed to answer it, and leaves more to say than a benchmark's usual 128 tokens.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mlx.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class BenchPrompt:
    """A user message to measure with. `name` tells it apart in tables, such as "code-2"."""

    name: str
    category: str
    text: str


_CHAT = (
    "What should a beginner know before growing tomatoes on a balcony? Cover the pot, light, water and usual mistakes.",
    """\
My neighbour has agreed to look after our cat for ten days while we are away in August. Please write the note that I \
will leave on the kitchen table. The cat is called Miso, eats twice a day, hides when the doorbell rings, and must not \
get out through the laundry window. The vet's number is on the fridge. Keep it friendly and easy to scan.""",
    "Explain why the sky is blue at noon and red at sunset, first for a curious ten-year-old, then for a student who "
    "knows what a wavelength is.",
    """\
Here are the minutes of a short meeting:

- Ana: the new booking page is ready, but the translations into French and Polish are missing.
- Tomek: the load test on Tuesday failed at 400 users; the database ran out of connections.
- Ana: marketing wants to announce the page on the 14th.
- Ruth: we could announce it in English only, and add the other languages a week later.
- Tomek: I need two days to raise the connection limit and run the test again. Without that I would not announce \
anything.
- Ruth: then let us decide on Friday, after the second test. I will tell marketing that the date may move.

Write an e-mail to the whole team. Start with the decision, then list who does what by when, then name the one risk \
that everybody should know about.""",
)

_CODE = (
    "Write a Python function `merge_intervals(intervals)` that merges overlapping intervals, with a docstring and "
    "three assertions that test it.",
    """\
This function is meant to return the n most frequent words of a text, but it has three bugs. Find them, explain each \
in a sentence, and give the corrected function.

```python
def top_words(text, n):
    counts = {}
    for word in text.split(" "):
        word = word.lower().strip(".,!?")
        if word in counts:
            counts[word] += 1
        else:
            counts[word] = 0
    ranked = sorted(counts.items(), key=lambda item: item[1])
    return [word for word, count in ranked[:n + 1]]
```""",
    """\
Write a small command-line to-do list in Python in one file, using only the standard library. It keeps its items in \
todo.json next to the script and knows four commands:

    todo.py add "buy milk"
    todo.py list
    todo.py done 2
    todo.py clear

Use argparse with subcommands, number the items from 1, mark finished ones with [x], and answer an unknown number with \
a clear message and exit code 1.""",
    """\
Rewrite this JavaScript class in TypeScript. Add types everywhere, make the fields private, replace the callback by a \
promise, and keep the behaviour as it is.

```javascript
class Cache {
  constructor(limit, load) {
    this.limit = limit;
    this.load = load;
    this.items = new Map();
  }

  get(key, callback) {
    if (this.items.has(key)) {
      const value = this.items.get(key);
      this.items.delete(key);
      this.items.set(key, value);
      callback(null, value);
      return;
    }
    this.load(key, (error, value) => {
      if (error) {
        callback(error);
        return;
      }
      this.items.set(key, value);
      if (this.items.size > this.limit) {
        const oldest = this.items.keys().next().value;
        this.items.delete(oldest);
      }
      callback(null, value);
    });
  }
}
```""",
)

_MATH = (
    "A bakery sells 48 rolls in the morning and two thirds as many in the afternoon, at 0.65 euros each. How much "
    "money does it take in the whole day? Show each step.",
    "Solve the equation 2x^2 - 7x + 3 = 0 step by step with the quadratic formula, and check both solutions by putting "
    "them into the equation.",
    """\
A train leaves Alder at 9:15 and drives to Birch, 180 km away, at 80 km/h. A second train leaves Birch at 9:45 and \
drives to Alder on the other track at 100 km/h. At what time do the trains meet, and how far from Alder is that? Write \
down what is known, set up an equation, solve it, and say in a sentence why the answer makes sense.""",
    """\
A class recorded how many books each pupil read in a month:

books   0   1   2   3   4   5
pupils  2   5   8   6   3   1

1. How many pupils are there, and how many books did they read together?
2. Work out the mean, the median and the mode.
3. One more pupil joins, who has read 12 books. Work out the three numbers again.
4. Which of the three changes most, and what does that say about choosing an average?

Number your answers in the same way and show the calculations.""",
)

BUILT_IN: tuple[BenchPrompt, ...] = tuple(
    BenchPrompt(name=f"{category}-{number}", category=category, text=text)
    for category, texts in (("chat", _CHAT), ("code", _CODE), ("math", _MATH))
    for number, text in enumerate(texts, start=1)
)


def read_prompts(path: Path) -> tuple[BenchPrompt, ...]:
    """Prompts from a JSONL file: an object a line with "prompt" and, if you like, "category" and "name".

    Empty lines are skipped. Raises UsageError, naming the line, for anything else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the prompts in {path}: {error}") from error
    prompts: list[BenchPrompt] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompts.append(_prompt(line, f"{path}, line {number}", prompts))
    if not prompts:
        raise UsageError(f'{path} has no prompts; expected lines such as {{"category": "chat", "prompt": "Hello"}}.')
    return tuple(prompts)


def _prompt(line: str, where: str, before: list[BenchPrompt]) -> BenchPrompt:
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: expected a JSON object; {error}") from error
    if not isinstance(fields, dict):
        raise UsageError(f"{where}: expected a JSON object; found {type(fields).__name__}.")
    fields = {"category": "other", **fields}
    unknown = sorted(fields.keys() - {"category", "prompt", "name"})
    if unknown:
        raise UsageError(f'{where}: unknown key {unknown[0]!r}; expected "prompt", "category" and "name".')
    category = fields["category"]
    fields.setdefault("name", f"{category}-{1 + sum(p.category == category for p in before)}")
    for key in ("prompt", "category", "name"):
        if not isinstance(fields.get(key), str) or not fields[key].strip():
            raise UsageError(f"{where}: {key!r} should be a text that is not empty; found {fields.get(key)!r}.")
    if any(fields["name"] == p.name for p in before):
        raise UsageError(f"{where}: the name {fields['name']!r} is used twice.")
    return BenchPrompt(name=fields["name"], category=category, text=fields["prompt"])


def choose_category(prompts: tuple[BenchPrompt, ...], category: str | None) -> tuple[BenchPrompt, ...]:
    """The prompts of one category, or all. Raises UsageError, naming the categories there are."""
    if category is None:
        return prompts
    chosen = tuple(prompt for prompt in prompts if prompt.category == category)
    if not chosen:
        known = ", ".join(dict.fromkeys(prompt.category for prompt in prompts))
        raise UsageError(f"no prompt has the category {category!r}; there are: {known}.")
    return chosen
