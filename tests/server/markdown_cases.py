"""Markdown documents, and their elements by markdown-it-py, for comparison with what the page makes of them."""

import random
import re
from html.parser import HTMLParser

from markdown_it import MarkdownIt

BLOCKS = {"p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "hr", "br"}
BLOCKS |= {"table", "thead", "tbody", "tr", "th", "td"}
# Whatever models do not write on purpose is left out of the page: indented code, underlined headings, references, HTML.
REFERENCE = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
REFERENCE.disable(["lheading", "code", "reference", "html_block", "html_inline"])

DOCUMENTS = [
    "Hello *there*, **world**, ***both***, ~~gone~~ and `code`.",
    "snake_case_word and _emphasis_ and __strong__ and 2*3*4 and a * b * c",
    "**bold *nested* text** and *outer **inner** text*",
    "**unfinished and *more",
    "***a** b* and **a*b** and *a**b*c** and ****x****",
    "`` a ` tick `` and ` spaced ` and `unfinished",
    "escaped \\*stars\\* and \\`ticks\\` and \\[brackets\\] and \\a",
    "a line  \nafter a break\\\nand another\nand a soft one",
    "&lt;b&gt; &amp; &#39; &#x41; &unknown; &copyless",
    "<b>not html</b> <script>alert(1)</script> <https://example.org/a?b=c>",
    '[a link](https://example.org) [with *emphasis*](<https://example.org/a b> "title") [empty]() [not] (a link)',
    "[outer [inner](https://a.example) text](b.example) and [a](https://c.example/(d)) end",
    "# One\n## Two ##\n###Three\n#### Four\n##### Five\n###### Six\n####### Seven\n#\n",
    "Text\n# Heading\nMore\n***\nText\n- - -\n_ _ _",
    "- one\n- two\n  - deeper\n    - deepest\n- three",
    "1. one\n2. two\n3. three\n\n7) seven\n8) eight",
    "- loose\n\n- list\n\n  with a paragraph\n- end",
    "* star\n+ plus\n- minus",
    "1. first\n\n   ```python\n   x = 1\n   ```\n\n2. second",
    "- item\nlazy line\n- next\n\nparagraph",
    "The year was\n1986. A great year\n- list\n1. one",
    "-\n- empty\n-   \n- end",
    "- a\n\n\n- b\n\n\n\nc",
    "> quote\n> more\nlazy\n\n> another\n>\n> > nested\n> - list",
    "> ```\n> code\n> ```\n> text",
    "```\nplain\n```\n\n~~~ js\nlet a = 1;\n~~~",
    "````\n```\ninside\n```\n````\nafter",
    "```python\nunfinished = True\n\n# not a heading",
    "```\n```\n\n```empty",
    "text\n```\ncode\n```\ntext",
    "   ```\n   indented\n  less\n   ```",
    "| a | b |\n|---|:-:|\n| 1 | 2 |\n| 3 |\n| 4 | 5 | 6 |\n\nafter",
    "a | b\n--|--\n`x` | **y**\n1 \\| 2 | 3",
    "| no | table |\ntext\n\n| a |\n|---|\n| b |",
    "text\n| a | b |\n|---|---|\n| 1 | 2 |\n# heading",
    "| a | b |\n|---|",
    "- a\n  > quote\n  ```\n  code\n  ```\n- b",
    "1. one\n   - two\n     1. three\n\n        paragraph\n2. four",
    "10. ten\n11. eleven\n    - inside",
    "a\n\n\n\nb\n   c\n",
    "\tx\n\n- \ty",
    "**Note:** see *this*.\n\n* **Key**: value\n* **Other**: `code`\n",
    "“*quoted*” and (*in brackets*) and *a*b and _a_b and a_b_",
    "**日本語**の文 and **déjà** vu",
]

_LINES = [
    "word", "*a*", "**b** c", "- item", "  - deeper", "1. one", "2. two", "   inside", "", "", "> quote", ">", "# h",
    "```", "```py", "\n| a | b |\n|---|--:|\n| 1 | `2` |", "| 1 | `2` |", "***", "a_b_ *c", "`x` **", "    four",
    "+ plus", "- ", "~~s~~",     "[l](https://e.org)", "1) x", "end\\", "~~~", "  two  ",
]  # fmt: skip


def random_documents(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["\n".join(rng.choices(_LINES, k=rng.randint(1, 9))) for _ in range(count)]


class _Tree(HTMLParser):
    """The tags and texts of HTML, with white space as a browser shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.in_pre = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        kept = {name: value for name, value in attrs if name in ("href", "start") or (tag, name) == ("code", "class")}
        self.in_pre |= tag == "pre"
        if "href" in kept:
            kept["href"] = re.sub(r"^(https?://[^/]*)$", r"\1/", kept["href"] or "")  # as browsers write it
        self.found.append(f"<{tag}{''.join(f' {name}={value}' for name, value in sorted(kept.items()))}>")

    def handle_endtag(self, tag: str) -> None:
        self.in_pre &= tag != "pre"
        if tag not in ("br", "hr"):
            self.found.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        # A browser leaves out the line end before the end of a code block.
        text = data.rstrip("\n") if self.in_pre else re.sub(r"\s+", " ", data)
        if text and self.found and not self.found[-1].startswith("<"):
            self.found[-1] += text
        elif text:
            self.found.append(text)


def elements(html: str) -> list[str]:
    """HTML as a list of tags and texts, without white space next to blocks and without links that lead nowhere."""
    tree = _Tree()
    tree.feed(html)
    tree.close()
    found = [re.sub(r"^<(h\d|t[hd]|[uo]l|p|li)\b[^>]*?( start=\d+)?>$", r"<\1\2>", item) for item in tree.found]
    cleaned: list[str] = []
    in_pre = False
    for i, item in enumerate(found):
        in_pre = (in_pre or item == "<pre>") and item != "</pre>"
        if not item.startswith("<") and not in_pre:
            before, after = (found[j] if 0 <= j < len(found) else "<p>" for j in (i - 1, i + 1))
            item = item.lstrip() if _is_block(before) else item
            item = item.rstrip() if _is_block(after) else item
        if item:
            cleaned.append(item)
    return cleaned


def _is_block(item: str) -> bool:
    return bool(re.match(r"</?(\w+)", item)) and re.match(r"</?(\w+)", item)[1] in BLOCKS  # type: ignore[index]


def expected(document: str) -> list[str]:
    html = REFERENCE.render(document)
    html = re.sub(r'<a href="(?!https?:)[^"]*"[^>]*>(.*?)</a>', r"\1", html)
    return elements(html)
