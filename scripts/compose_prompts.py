# ruff: noqa: E501
# fmt: off
"""Compose prompts as people write them, for the demo drafter's training.

    python scripts/compose_prompts.py COUNT SEED [long] > prompts.jsonl

Frames of every kind of task are filled with subjects, names, numbers, notes and source code. Code and texts to work on
are taken from the Python that runs this (its standard library), words from prompt_words.py. The same Python, COUNT and
SEED give the same prompts. long: only prompts with texts, tables and code of a page or several.
"""

import ast
import json
import random
import re
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from prompt_words import FACTS, LETTER_REASONS, LISTS, PAIRS, choices

T = TypeVar("T")


class Composer:
    def __init__(self, seed: int, *, long: bool = False) -> None:
        self.random = random.Random(seed)
        self.long = long
        self.functions = list(library_functions())
        self.texts = list(library_texts())
        self.kinds: dict[Callable[[], str], float] = {
            self.question: 14, self.writing: 9, self.letter: 6, self.advice: 8, self.fact: 4, self.difference: 3,
            self.code: 14, self.code_by_docstring: 6, self.code_given: 7,
            self.sum: 9, self.arithmetic: 5, self.equation: 4, self.data: 3,
            self.translation: 5, self.text_given: 8, self.extraction: 6, self.table: 2, self.rewriting: 3, self.copying: 2,
        }
        if long:
            self.kinds = {self.text_given: 9, self.code_given: 6, self.extraction: 5, self.table: 3, self.copying: 1}

    def prompts(self, count: int) -> Iterator[str]:
        kinds, shares = list(self.kinds), list(self.kinds.values())
        seen: set[str] = set()
        while len(seen) < count:
            prompt = self.random.choices(kinds, shares)[0]().strip()
            if prompt not in seen:
                seen.add(prompt)
                yield prompt

    def fill(self, frame: str, **given: str) -> str:
        def value(found: re.Match[str]) -> str:
            name = found.group(1)
            return given[name] if name in given else self.one(LISTS[name])

        while re.search(r"\{(\w+)\}", frame):
            frame = re.sub(r"\{(\w+)\}", value, frame)
        return " ".join(frame.split(" ")).replace("  ", " ")

    def one(self, values: Sequence[T]) -> T:
        return self.random.choice(values)

    def number(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def price(self) -> str:
        return f"{self.number(0, 60)}.{self.one(['00', '20', '25', '40', '50', '75', '80', '90', '95', '99'])}"

    # Talk

    def question(self) -> str:
        return self.fill(self.one([
            "Explain {subject} to {audience}.", "Explain {subject} {form}.", "Explain {subject} to {audience} {form}.",
            "What is the most important thing to know about {subject}?", "What are the advantages and disadvantages of {subject}?",
            "Why is the subject of {subject} important? Answer {form}.", "Write an introduction to {subject} {form}.",
            "What should {audience} know about {subject}? Cover the basics, common mistakes and where to learn more.",
            "List five interesting facts about {subject}.", "Give me an overview of {subject} {form}.",
            "What are common misunderstandings about {subject}?", "How has our view of {subject} changed over time?",
            "I have to give a talk about {subject}. Write an outline with an opening and a closing sentence.",
            "Write a quiz with five questions about {subject}, and give the answers at the end.",
            "Explain first what {subject} means, then why it matters, and finally give an example.",
            "How does {subject} affect our daily life?", "Tell me about {subject}.", "{subject}: explain {form}, please.",
            "How would you describe {subject} to {audience}? Use a {tone} tone.",
            "Compare {subject} with {subject} {form}.", "What is the connection between {subject} and {subject}?",
        ]))

    def writing(self) -> str:
        return self.fill(self.one([
            "Write {genre} about {hero}.", "Write {genre} about {subject}.", "Write {genre} about {hero} and {hero} who meet in {town}.",
            "Write {genre} about {hero}. Keep it {tone}, and end with a surprise.",
            "Write the first paragraph of a novel about {hero} in {town}.", "Continue this story: One {day} morning, {name} opened the door and saw {hero}.",
            "Write {genre} in which {hero} learns something about {subject}.", "Write {genre} for {audience} about {subject}.",
            "Describe {hero} {form}.", "Give me ten titles for {genre} about {hero}.",
            "Write a {tone} dialogue between {name}, a {job}, and {name}, a {job}, about {subject}.",
            "Write {genre} of four parts with headings. It is about {subject}, and the readers are {audience}.",
        ]))

    def letter(self) -> str:
        reason = self.fill(self.one(choices(LETTER_REASONS)))
        return self.fill(self.one([
            "Write a {tone} e-mail to {name} {family}: {reason}.", "Write a {tone} letter. {reason}. My name is {name} {family}.",
            "Please write a note for my colleagues: {reason}. Keep it {tone}.",
            "Write a {tone} message to my landlord, {name} {family}. {reason}. Ask for an answer by {day}.",
            "Draft an e-mail in a {tone} tone. Reason: {reason}. Sign it with {name}. Add a subject line.",
            "Write a {tone} answer to this message:\n\nHello {name},\n{reason}. Can you help me?\nBest wishes, {name}",
        ]), reason=reason[0].upper() + reason[1:] if self.random.random() < 0.5 else reason)

    def advice(self) -> str:
        return self.fill(self.one([
            "How do I {activity}?", "How can I {activity}? Answer {form}.", "Give me tips to {activity}.", "I want to {activity}. Where do I begin?",
            "What do I need to {activity}?", "Write a checklist for somebody who wants to {activity}.",
            "What mistakes do people make when they {activity}?", "Make a plan for four weeks to {activity}.",
            "I am a {job} and have little time. How can I {activity} nevertheless?",
            "Write a guide for {audience}: how to {activity}. Use headings and short steps.",
            "My friend {name} wants to {activity}. Write {form} what you would recommend.",
            "I would like to {activity}, but I have only {money} dollars. What would you do first?",
        ]), money=str(10 * self.number(2, 60)))

    def fact(self) -> str:
        return self.fill(self.one(choices(FACTS)))

    def difference(self) -> str:
        first, second = self.one(choices(PAIRS)).split("|")
        return self.fill(self.one([
            f"What is the difference between {first} and {second}?", f"Compare {first} and {second} {{form}}.",
            f"{first[0].upper() + first[1:]} or {second}: which is better for {{audience}}, and why?",
            f"When would you choose {first}, and when {second}? Explain {{form}}.",
        ]))

    # Code

    def code(self) -> str:
        return self.fill(self.one([
            "Write a {programming} function that {task}. {extra}", "Write a {language1} program that {task}. {extra}",
            "Write a Python function that {task}. {extra}", "Write a Python script that {task}. {extra}",
            "Write a Python function `{function}` that {task}. {extra} {extra}", "How do I write a function that {task} in {programming}?",
            "Create a Python class with a method that {task}. {extra}",
            "Write two versions of a Python function that {task}: a simple one and a fast one. Compare them.",
            "Write unit tests for a Python function that {task}.", "Explain step by step how a program {task}, then write it in {programming}.",
        ]), language1=self.one(LISTS["programming"]), function=self.one(["solve", "run", "compute", "process", "convert", "helper"]))

    def code_by_docstring(self) -> str:
        name, signature, summary, _ = self.one(self.functions)
        return self.one([
            f"Write a Python function `{name}{signature}`. Its docstring is:\n\n{summary}",
            f"Complete this function:\n\n```python\ndef {name}{signature}:\n    \"\"\"{summary}\"\"\"\n```",
            f"Implement `{name}{signature}` in Python. {summary}",
            f"What would a function called `{name}` with the description \"{summary}\" look like in Python?",
        ])

    def code_given(self) -> str:
        name, _, _, source = self.one(self.functions)
        for _ in range(self.number(2, 8) if self.long else 0):
            source += f"\n\n\n{self.one(self.functions)[3]}"
        ask = self.one([
            "Explain what this code does.", "Explain this function line by line.", "Add comments to this code.", "Write a docstring for this function.",
            "Are there any bugs in this function?", "Rewrite this function so that it is easier to read.", "Add type hints to this function.",
            f"Write tests for `{name}`.", "Translate this function into JavaScript.", "What does this function return?",
            f"Rename the function `{name}` to `{self.one(['compute', 'load', 'update', 'check', 'handle'])}_{self.one(['value', 'item', 'entry', 'data'])}` and print the whole code again.",
            "Print this code again with better variable names.", "Shorten this function without changing what it does.",
        ])
        return f"{ask}\n\n```python\n{source}\n```"

    # Numbers

    def sum(self) -> str:
        a, b, c = self.number(2, 90), self.number(2, 40), self.number(2, 12)
        ask = self.one(["", "", " Show each step.", " Explain your answer.", " Show your work.", " Give only the result and one sentence."])
        return self.fill(self.one([
            "{place} has {a} {items} and sells {b} of them each day for {c} days. How many {items} are left?",
            "{name} buys {b} {items} at {price} dollars each and {c} {items} at {price} dollars each. How much does {name} pay?",
            "{name} has {a} {items}. {name1} has {c} times as many. How many {items} do they have together?",
            "{place} orders {c} boxes of {items} with {b} in each box. {a} are broken. How many can be used?",
            "{name} earns {price} dollars an hour and works {b} hours a week. How much is that in {c} weeks?",
            "A car drives {a} km in {c} hours. How far does it drive in {b} hours at the same speed?",
            "A train leaves {town} at {hour}:{minute} and arrives in {town} {a} minutes later. When does it arrive?",
            "{items1} cost {price} dollars. In a sale the price is {percent} % lower. What is the new price?",
            "Share {a} {items} among {c} people as equally as you can. How many does each get, and how many are left?",
            "A rectangle is {a} cm long and {b} cm wide. What are its area and its perimeter?",
            "In a class of {a} pupils, {percent} % play football. How many pupils is that?",
            "A tank holds {a}0 litres. Each minute {c} litres flow in and {d} litres flow out. How long until it is full?",
            "{name} reads {b} pages a day. A book has {a}0 pages. How many days does {name} need?",
            "A recipe for {c} people needs {a}0 g of flour and {b} eggs. How much is needed for {d} people?",
            "{name} is {b} years older than {name1}. Together they are {a}0 years old. How old is each?",
            "{place} took {a}{b} dollars on {day} and {c}{b} dollars on {day}. What is the difference, and what is the average?",
        ]) + ask, a=str(a), b=str(b), c=str(c), d=str(self.number(2, 12)), price=self.price(), percent=str(5 * self.number(1, 16)),
            name1=self.one(LISTS["name"]), items1=f"{b} {self.one(LISTS['items'])}", hour=str(self.number(6, 21)),
            minute=f"{5 * self.number(0, 11):02}")

    def arithmetic(self) -> str:
        a, b, c = self.number(2, 999), self.number(2, 99), self.number(2, 20)
        return self.one([
            f"What is {a} + {b} * {c}?", f"Calculate {a} - {b}.", f"What is {a} times {b}? Show the steps.", f"Compute {a} / {c} to two decimals.",
            f"What is {b} % of {a}?", f"Write {b}/{c + 1} as a decimal and as a percentage.", f"Simplify the fraction {b * c}/{a}.",
            f"What is the remainder of {a} divided by {c}?", f"Convert {a} minutes to hours and minutes.", f"Round {a}.{b} to the nearest ten.",
            f"Find the greatest common divisor of {a} and {b}.", f"Find the least common multiple of {b} and {c}.",
            f"List the prime factors of {a}.", f"Convert {b} kilometres to miles.", f"What is the square root of {b * b}?",
            f"Is {a} a prime number? Explain.", f"Continue the sequence: {b}, {b + c}, {b + 2 * c}, {b + 3 * c}, ...",
            f"Put these numbers in order: {a}, {b}, {c}, {self.number(1, 999)}, {self.number(1, 999)}.",
        ])

    def equation(self) -> str:
        a, b, c, x = self.number(2, 9), self.number(1, 20), self.number(2, 9), self.number(1, 12)
        equation = self.one([
            f"{a}x + {b} = {a * x + b}", f"{a}x - {b} = {a * x - b}", f"{a}(x + {b}) = {a * (x + b)}", f"{a}x + {b} = {c}x + {(a - c) * x + b}",
            f"x^2 - {x + b}x + {x * b} = 0", f"x^2 + {x + b}x + {x * b} = 0", f"x^2 = {x * x}", f"x/{a} + {b} = {x + b}",
            f"{a}x^2 - {a * (x + b)}x + {a * x * b} = 0",
        ])
        return self.one([
            f"Solve {equation} for x.", f"Solve the equation {equation} step by step.", f"Find x: {equation}. Check your solution.",
            f"Solve the system of equations x + y = {x + b} and x - y = {x - b}.", f"Differentiate f(x) = {a}x^{c} + {b}x.",
            f"Find the area of a circle with radius {b}.", f"What is the slope of the line through ({x}, {b}) and ({x + a}, {b + c * a})?",
            f"A right triangle has legs of {3 * a} and {4 * a}. How long is the third side?", f"Expand ({a}x + {b})(x - {c}).",
            f"Factor x^2 + {x + b}x + {x * b}.", f"What is the probability of rolling a {1 + x % 6} {a} times in a row with a fair die?",
            f"Integrate f(x) = {a}x^{c}.", f"What is {equation.split('=')[0].strip()} for x = {x}?",
        ])

    def data(self) -> str:
        values = ", ".join(str(self.number(1, 60)) for _ in range(self.number(5, 12)))
        return self.fill(self.one([
            "Find the mean, the median and the mode of these numbers: {values}.", "Here are the {items} sold on each day: {values}. What do you notice?",
            "{name} measured these times in minutes: {values}. Compute the average and the range. Show each step.",
            "Which of these numbers are even, and which are prime? {values}", "Sort these numbers from large to small and add the three largest: {values}.",
            "Write Python code that computes the mean and the standard deviation of [{values}], and say what it prints.",
        ]), values=values)

    # Texts to work on

    def notes(self) -> list[str]:
        """Sentences with names, times, places and amounts, as in messages and minutes."""
        frames = [
            "{name} {family} called on {day} at {hour}:{minute} about {n} {items}.", "The {items} cost {price} dollars each, and {place} needs {n}.",
            "We meet on {day}, {date} {month}, at {hour}:{minute} in {town}.", "{name} will bring {n} {items} and talk about {subject}.",
            "In {month} {place} in {town} sold {n}0 {items}, {percent} per cent more than the year before.", "{name}: I can only come after {hour}:{minute}.",
            "The new {job}, {name} {family}, begins on {date} {month}.", "Please send the invoice over {price} dollars to {name} {family} in {town}.",
            "Two of the {n} {items} were broken, and {name} asks for new ones.", "{place} in {town} is closed on {day} because of repairs.",
            "The course about {subject} has {n} places left and costs {price} dollars.", "On {day} it rained, so we stayed inside and talked about {subject}.",
            "{name} thinks that the {items} are too expensive, but {name} likes them.", "The bus from {town} to {town} takes {n} minutes and leaves at {hour}:{minute}.",
            "Many visitors asked about {subject}; we should write a page about it.", "The order number is {n}-{n}{n}.",
        ]
        sentences = []
        for _ in range(self.number(20, 60) if self.long else self.number(3, 12)):
            text = self.fill(
                self.one(frames), hour=str(self.number(8, 19)), minute=f"{5 * self.number(0, 11):02}", n=str(self.number(3, 90)),
                price=self.price(), percent=str(self.number(2, 40)), date=str(self.number(1, 28)),
            )
            sentences.append(text[0].upper() + text[1:])
        return sentences

    def passage(self) -> str:
        if self.random.random() < 0.55:
            return self.one([" ".join, "\n".join, lambda lines: "\n".join(f"- {x}" for x in lines)])(self.notes())
        texts = [self.one(self.texts), *(self.one(self.texts) for _ in range(self.number(3, 9) if self.long else 0))]
        return "\n\n".join(texts)

    def text_given(self) -> str:
        ask = self.fill(self.one([
            "Summarise this text {form}.", "Summarise the following in one sentence.", "What are the main points of this text?",
            "Give this text a title and summarise it {form}.", "Explain this to {audience}.", "Write three questions about this text and answer them.",
            "Rewrite this in a {tone} tone.", "Turn this into a list of bullet points.", "What is missing in this text?", "Rewrite this in simpler words.",
            "Summarise this for {name}, who has no time, and then list what has to be done.", "Which numbers are in this text, and what do they mean?",
        ]))
        return self.one([f"{ask}\n\n{self.passage()}", f"Here is a text.\n\n{self.passage()}\n\n{ask}", f"{ask}\n\nText: {self.passage()}"])

    def extraction(self) -> str:
        ask = self.one([
            "Extract all names from this text as a list.", "Extract names, dates and amounts, and return them as JSON.", "Who does what, and when? Make a table.",
            'Return a JSON object with the keys "people", "places" and "dates".', "List all places and times in this text.",
            "Make a table with the columns who, what and when.", "Which amounts of money are named? List each with what it is for.",
            'Return a JSON list; each entry has "name", "item" and "quantity". Leave out what is not said.', "Is the mood of this text good, mixed or bad? Explain.",
            "Extract the tasks from these notes and give each an owner.",
        ])
        return f"{ask}\n\n{self.one([' '.join, chr(10).join])(self.notes())}"

    def table(self) -> str:
        rows = [
            f"{self.one(LISTS['name'])},{self.one(LISTS['town'])},{self.one(LISTS['items'])},{self.number(1, 30)},{self.price()}"
            for _ in range(self.number(20, 50) if self.long else self.number(4, 14))
        ]
        ask = self.one([
            "Who bought most?", "What is the total of each town?", "Write this as a Markdown table.", "Convert this to JSON.", "Which row has the highest price?",
            "Sort the rows by name and print the table again.", "Write Python code that reads this and prints the total of each town.",
            "Describe this table in three sentences.",
        ])
        return "Here is a table.\n\nname,town,item,quantity,price\n" + "\n".join(rows) + f"\n\n{ask}"

    def translation(self) -> str:
        text = " ".join(self.notes()[: self.number(1, 6)])
        return self.fill(self.one([
            "Translate into {language}: {text}", "Translate this text into {language}.\n\n{text}", "How do you say this in {language}?\n\n{text}",
            "Translate into {language}, sentence by sentence. Write the English first and the translation below it.\n\n{text}",
            "Translate this e-mail into {language} and keep it {tone}.\n\nDear {name},\n\n{text}\n\nBest regards\n{name}",
            "What does the {language} word for \"{items}\" sound like, and how is it used in a sentence?",
        ]), text=text)

    def rewriting(self) -> str:
        return self.fill(self.one([
            "Make this sentence shorter: {text}", "Correct the mistakes: {text}", "Rewrite in the passive voice: {text}", "Make this more {tone}: {text}",
            "Rewrite as a question: {text}", "Write three other ways to say this: {text}", "Put this into the future tense: {text}",
        ]), text=self.one(self.notes()))

    def copying(self) -> str:
        ask = self.one([
            "Repeat this text word for word.", "Copy this exactly as it is.", "Print this again, with every number written in words.",
            "Copy this text and correct only its spelling.", "Print this list again in alphabetical order.", "Number these lines.",
        ])
        return f"{ask}\n\n{self.passage()}"


def library_modules() -> Iterator[tuple[str, ast.Module]]:
    """Text and syntax tree of the modules of Python's standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
    for file in sorted(file for file in folder.rglob("*.py") if not skipped & set(file.relative_to(folder).parts)):
        try:
            text = file.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError):
            continue
        yield text, tree


def library_functions() -> Iterator[tuple[str, str, str, str]]:
    """(name, signature, first paragraph of the docstring, source) of functions of 4 to 30 lines with a docstring."""
    for text, tree in library_modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
                continue
            doc = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
            source = textwrap.dedent(ast.get_source_segment(text, node, padded=True) or "")
            if 20 <= len(doc) <= 300 and 4 <= source.count("\n") <= 30 and len(source) <= 1400:
                yield node.name, f"({ast.unparse(node.args)})", doc, source


def library_texts() -> Iterator[str]:
    """Prose of 200 to 1,200 characters out of docstrings: paragraphs of words, not of code."""
    for _, tree in library_modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            for part in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                words = " ".join(part.split())
                if 200 <= len(words) <= 1200 and sum(c.isalpha() or c == " " for c in words) > 0.93 * len(words):
                    yield words


if __name__ == "__main__":
    for prompt in Composer(int(sys.argv[2]), long=sys.argv[3:] == ["long"]).prompts(int(sys.argv[1])):
        print(json.dumps({"prompt": prompt}, ensure_ascii=False))
