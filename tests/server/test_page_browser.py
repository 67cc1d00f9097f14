"""The page at / in a real browser, against a worker that answers by a script. Skipped where there is no browser."""

import importlib.util
import json
from pathlib import Path

import pytest
from browser import open_browser
from fakes import FakePair, FakeTokenizer, FakeWorker, running
from markdown_cases import DOCUMENTS, elements, expected, random_documents

from dflash_mlx.server.security import Policy

pytestmark = [pytest.mark.browser, pytest.mark.slow]

ANSWER = "It is *blue*.\n\n```python\nprint(1)\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
LONG = "word " * 400
ENTER, ESCAPE, SHIFT, RELEASED, TAB, UP = "\ue007", "\ue00c", "\ue008", "\ue000", "\ue004", "\ue013"

# What `render` makes of documents, in the words of HTML: without what the page adds around code and tables.
RENDER = """
const { render } = await import("/page/markdown.js");
return values[0].map((source) => {
  const root = document.createElement("div");
  render(root, source);
  for (const extra of root.querySelectorAll(".code-head")) extra.remove();
  for (const wrapper of root.querySelectorAll("div, span")) wrapper.replaceWith(...wrapper.childNodes);
  for (const shown of root.querySelectorAll("[data-level]")) {
    const heading = document.createElement(`h${shown.dataset.level}`);
    heading.append(...shown.childNodes);
    shown.replaceWith(heading);
  }
  return root.innerHTML;
});
"""

# Every beginning of a document, one after another in one element, against the same beginning in a new one.
GROW = """
const { render } = await import("/page/markdown.js");
const wrong = [];
for (const source of values[0]) {
  const grown = document.createElement("div");
  for (let end = 1; end <= source.length; end++) {
    const first = grown.childElementCount > 2 ? grown.firstChild : null;
    render(grown, source.slice(0, end));
    const fresh = document.createElement("div");
    render(fresh, source.slice(0, end));
    if (grown.innerHTML !== fresh.innerHTML) wrong.push(source.slice(0, end));
    if (first && grown.firstChild !== first) wrong.push(`made anew: ${source.slice(0, end)}`);
  }
}
return wrong;
"""

HOSTILE = [
    "<img src=x onerror=hit()><script>hit()</script><svg onload=hit()>",
    "[a](javascript:hit()) [b](  JaVaScRiPt:hit()) [c](data:text/html,<script>hit()</script>) [d](//evil.example)",
    '![picture](https://evil.example/x.png) ![x](javascript:hit()) <javascript:hit()> <https://e.example/"onx=hit()>',
    '[e](https://e.example/" onmouseover="hit()) [f](https://e.example \'x" onclick="hit()\')',
    '```"><img src=x onerror=hit()>\n</code></pre><script>hit()</script>\n```',
    "| <b onclick=hit()>x</b> | [y](vbscript:hit) |\n|---|---|\n| <iframe src=//evil.example> | `</td><script>` |",
    "&lt;script&gt;hit()&lt;/script&gt; &#60;img src=x onerror=hit()&#62; &#0; &#xD800; &constructor; &toString;",
    ">" * 3000 + "deep",
    "- " * 3000 + "deep",
    "*a **b " * 2000,
    "[" * 5000 + "]" * 5000,
    "`" * 3000 + " " + "``" * 2000,
]


@pytest.fixture(scope="module")
def browser():
    with open_browser() as found:
        yield found


@pytest.fixture
def visit(browser):
    """visit(server) opens the page. Afterwards, nothing may have complained, or asked for anything outside."""
    urls, allowed = [], []

    def open_page(server, *, allow=None, **look):
        browser.look(**look)
        browser.complaints()
        browser.addresses()
        urls.append(server.url)
        allowed.append(allow or "nothing is allowed")
        browser.driver.get(server.url + "/")
        browser.find("#input")
        if allow is None:
            browser.until(lambda: browser.text("#model-line").startswith("fake"))
        return browser

    yield open_page
    # The page asks now and then whether the server is there, which ends before the browser leaves.
    gone = tuple(f"{url}/health" for url in urls)
    complaints = [line for line in browser.complaints() if not (line.startswith(gone) and "REFUSED" in line)]
    assert [line for line in complaints if allowed[-1] not in line] == []
    addresses = browser.addresses()
    assert addresses
    assert [url for url in addresses if not url.startswith((*urls, "data:", "blob:"))] == []
    browser.driver.get("about:blank")


def ask(browser, text):
    browser.find("#input").send_keys(text + ENTER)


def wait_for_answers(browser, count):
    browser.until(lambda: browser.is_idle() and len(browser.all(".message.answer")) == count)


def prompt_of(job):
    return "".join(map(chr, job.prompt))


def test_markdown_is_what_the_reference_makes_of_it(visit):
    documents = [*DOCUMENTS, *random_documents(400, seed=5)]
    with running() as server:
        made = visit(server).run_async(RENDER, documents)
    wrong = {doc: elements(html) for doc, html in zip(documents, made, strict=True) if elements(html) != expected(doc)}
    assert wrong == {}


def test_an_answer_that_grows_looks_as_if_it_had_come_at_once(visit):
    with running() as server:
        assert visit(server).run_async(GROW, [*DOCUMENTS, *random_documents(40, seed=6)]) == []


def test_hostile_text_stays_text(visit):
    """No element but Markdown's, no link but to the web, and no time without end."""
    worker = FakeWorker(script=lambda job: "\n\n".join(HOSTILE[:7]), size=40)
    with running(worker) as server:
        browser = visit(server)
        browser.run("window.hits = 0; window.hit = () => window.hits++")
        ask(browser, HOSTILE[0])
        wait_for_answers(browser, 1)
        seconds = browser.run_async(
            'const { render } = await import("/page/markdown.js"); const start = performance.now();'
            'for (const text of values[0]) render(document.createElement("div"), text);'
            "return (performance.now() - start) / 1000;",
            HOSTILE,
        )
        tags = set(browser.run("return [...document.querySelectorAll('.content *, .bubble *')].map((e) => e.tagName)"))
        links = browser.run("return [...document.querySelectorAll('.content a')].map((e) => [e.href, e.rel, e.target])")
        assert browser.run("return window.hits") == 0
        assert browser.text(".bubble") == HOSTILE[0]
    assert not tags & {"IMG", "SCRIPT", "IFRAME", "B", "STYLE", "FORM", "OBJECT"}
    assert links
    assert {(url.split("/")[0], *rest) for url, *rest in links} == {("https:", "noopener noreferrer", "_blank")}
    assert seconds < 20


def test_a_conversation(visit):
    """Text, code and tables as they stream; rounds as bars; reasoning folded; all of it there after a reload."""
    pair = FakePair(tokenizer=FakeTokenizer(has_thinking=True))
    worker = FakeWorker(script=lambda job: f"Hm.</think>{ANSWER}", size=4, delay=0.01)
    with running(worker, pair=pair) as server:
        browser = visit(server)
        browser.find("#input").send_keys(f"two{SHIFT}{ENTER}{RELEASED}lines{ENTER}")
        wait_for_answers(browser, 1)
        rounds = -(-(len(f"Hm.</think>{ANSWER}") + 1) // 4)

        def check():
            assert browser.text(".bubble") == "two\nlines"
            assert [browser.text(f".content {tag}") for tag in ("em", "pre", "td")] == ["blue", "print(1)", "1"]
            assert browser.text(".reasoning-text") == "Hm."
            assert browser.run("return document.querySelector('.reasoning').open") is False
            assert browser.text("#rounds") == str(rounds)
            assert browser.text("#speed") == "50.0", "the server's own figure stands at the end"
            assert len(browser.all("#bars .own")) == rounds
            assert len(browser.all("#bars .kept")) == rounds - (len(f"Hm.</think>{ANSWER}") % 4 == 0)

        check()
        ask(browser, "more")
        wait_for_answers(browser, 2)
        sent = prompt_of(worker.jobs[-1])
        assert "[user]two\nlines" in sent
        assert f"[assistant]{ANSWER.strip()}" in sent.replace(ANSWER, ANSWER.strip())
        assert "Hm." not in sent, "old reasoning is not sent again"
        browser.driver.refresh()
        browser.until(lambda: len(browser.all(".message.answer")) == 2)
        check()
        assert browser.texts("#conversations .open") == ["two"]


def test_blocks_are_marked_while_they_arrive(visit):
    worker = FakeWorker(script=lambda job: LONG, size=10, delay=0.1)
    with running(worker) as server:
        browser = visit(server)
        marked = (
            "return ['block-1', 'block-2', 'block-3'].map((name) => [...(CSS.highlights.get(name) ?? [])]"
            ".map((r) => r.startContainer.data.slice(r.startOffset, r.endOffset)).join(''))"
        )
        if not browser.run("return 'highlights' in CSS"):
            pytest.skip("this browser cannot mark text")
        ask(browser, "long")
        browser.until(lambda: len(browser.text(".content")) >= 40)
        newest, *older = browser.run(marked)
        assert newest.strip() == "word word"
        assert [block.strip() for block in older] == ["word word", "word word"]
        browser.type(ESCAPE)
        browser.until(browser.is_idle)
        assert browser.run(marked) == ["", "", ""]


def test_stop_retry_and_edit(visit):
    worker = FakeWorker(script=lambda job: LONG, size=5, delay=0.05)
    with running(worker) as server:
        browser = visit(server)
        ask(browser, "first")
        browser.until(lambda: "word" in browser.text(".content"))
        browser.type(ESCAPE)
        wait_for_answers(browser, 1)
        assert browser.text(".state") == "Stopped."
        browser.until(lambda: worker.cancelled == 1 and worker.running == 0)
        kept = browser.text(".content")
        assert 0 < len(kept) < len(LONG)

        worker.script, worker.delay = (lambda job: "plain" if not job.draft else "drafted"), 0.0
        browser.find("#draft").click()
        assert browser.find("#draft").get_attribute("aria-checked") == "false"
        browser.find(".answer .actions button").click()
        browser.until(lambda: browser.is_idle() and browser.text(".content") == "plain")
        assert "drafting off" in browser.text(".figures")
        browser.find("#draft").click()
        browser.find(".answer .actions button").click()
        browser.until(lambda: browser.is_idle() and browser.text(".content") == "drafted")
        assert "acceptance length" in browser.text(".figures")
        assert "without drafting 50.0 tok/s" in browser.text(".figures"), "next to what it was before"

        ask(browser, "second")
        wait_for_answers(browser, 2)
        browser.find(".message.user .actions button").click()
        browser.until(lambda: browser.run("return document.activeElement.value") == "first")
        browser.type("!", ENTER)
        wait_for_answers(browser, 1)
        assert browser.texts(".bubble") == ["first!"]
        assert prompt_of(worker.jobs[-1]) == '[user]first!""\n'
        browser.find("#input").send_keys(UP)
        browser.until(lambda: browser.run("return document.activeElement.value") == "first!")
        browser.type(ESCAPE)
        assert browser.texts(".bubble") == ["first!"]


def test_a_question_after_one_without_an_answer(visit):
    """They are sent as one: many chat templates want question and answer to take turns."""
    worker = FakeWorker(delay=60)
    with running(worker) as server:
        browser = visit(server)
        ask(browser, "first")
        browser.until(lambda: worker.jobs)
        browser.type(ESCAPE)
        wait_for_answers(browser, 1)
        worker.delay = 0.0
        ask(browser, "second")
        wait_for_answers(browser, 2)
        assert prompt_of(worker.jobs[-1]) == '[user]first\n\nsecond""\n'


def test_settings_reach_the_server(visit):
    with running(names=("fake", "other")) as server:
        browser = visit(server)
        browser.find("#open-settings").click()
        values = {"system": "Be brief.", "temperature": "0.7", "top_p": "0.9", "max_tokens": "5", "seed": "3"}
        for name, value in values.items():
            browser.find(f"#settings [name={name}]").send_keys(value)
        browser.find("#settings [name=model] [value=other]").click()
        browser.type(ESCAPE)
        ask(browser, "Hi")
        wait_for_answers(browser, 1)
        [job] = server.worker.jobs
        assert prompt_of(job) == '[system]Be brief.""\n[user]Hi""\n'
        params = job.params
        assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.7, 0.9, 5, 3)
        assert browser.text(".content") == "Hello"
        assert "most tokens" in browser.text(".state")
        assert browser.text("#model-line").startswith("other")


@pytest.mark.parametrize(("mode", "drafts"), [("dflash", True), ("ngram", True), ("plain", False)])
def test_the_switch_is_for_servers_that_draft(visit, mode, drafts):
    with running(FakeWorker(mode=mode)) as server:
        browser = visit(server)
        browser.until(lambda: browser.find("#draft").is_enabled() == drafts)
        assert browser.find("#draft").get_attribute("aria-checked") == str(drafts).lower()


def test_a_server_that_is_not_ready(visit):
    worker = FakeWorker(ready=False)
    with running(worker) as server:
        browser = visit(server, allow="status of 503")
        browser.until(lambda: "measures this machine first" in browser.text("#model-line"))
        worker.ready = True
        browser.until(lambda: "stay in this browser" in browser.text("#model-line"))


def test_the_key(visit):
    """It is asked for, refused when wrong, kept for the tab, and sent with every request."""
    with running(policy=Policy(keys=("right",))) as server:
        browser = visit(server, allow="status of 401")
        for attempt in ("wrong", "right"):
            browser.until(lambda: browser.run("return document.querySelector('#key-dialog').open"))
            browser.find("#key-input").send_keys(attempt + ENTER)
        browser.until(lambda: browser.text("#model-line").startswith("fake"))
        ask(browser, "Hi")
        wait_for_answers(browser, 1)
        assert browser.text(".content") == "Hello there, world."
        assert "right" not in browser.run("return JSON.stringify({...localStorage})")
        browser.driver.refresh()
        browser.until(lambda: browser.text("#model-line").startswith("fake"))
        browser.run("sessionStorage.clear()")
        ask(browser, "again")
        browser.until(lambda: browser.run("return document.querySelector('#key-dialog').open"))
        browser.find("#key-remember").click()
        browser.find("#key-input").send_keys("right" + ENTER)
        wait_for_answers(browser, 2)
        assert browser.texts(".content")[1] == "Hello there, world.", "the question was not lost"
        assert browser.run("return localStorage.getItem('dflash-mlx/key')") == "right"


def test_conversations_are_kept_renamed_exported_and_deleted(visit):
    with running() as server:
        browser = visit(server)
        ask(browser, "first question")
        wait_for_answers(browser, 1)
        browser.find("#new").click()
        ask(browser, "second question")
        wait_for_answers(browser, 1)
        titles = lambda: browser.texts("#conversations .open")  # noqa: E731
        assert titles() == ["second question", "first question"]
        browser.find("[aria-label=Rename]").click()
        browser.type("new name", ENTER)
        browser.until(lambda: titles() == ["new name", "first question"])

        browser.run("URL.createObjectURL = (blob) => { blob.text().then((t) => (window.file = t)); return '#'; }")
        browser.find("[aria-label='Export as JSON']").click()
        exported = json.loads(browser.until(lambda: browser.run("return window.file")))
        assert exported["title"] == "new name"
        assert [message["role"] for message in exported["messages"]] == ["user", "assistant"]

        browser.find("[aria-label=Delete]").click()
        browser.until(lambda: titles() == ["first question"])
        browser.find("#notice button").click()
        browser.until(lambda: titles() == ["new name", "first question"])
        browser.all("#conversations .open")[1].click()
        browser.until(lambda: browser.text(".bubble") == "first question")
        browser.find("[aria-label=Delete]").click()
        browser.driver.refresh()
        browser.until(lambda: titles() == ["new name"])


def test_an_exported_conversation_can_be_imported(visit, tmp_path):
    with running() as server:
        browser = visit(server)
        browser.find("#open-settings").click()
        browser.find("#settings [name=system]").send_keys("Be brief.")
        browser.type(ESCAPE)
        ask(browser, "first question")
        wait_for_answers(browser, 1)
        browser.run("URL.createObjectURL = (blob) => { blob.text().then((t) => (window.file = t)); return '#'; }")
        browser.find("[aria-label='Export as JSON']").click()
        file = tmp_path / "first.json"
        file.write_text(browser.until(lambda: browser.run("return window.file")), encoding="utf-8")
        shown = browser.texts(".message")
        browser.find("[aria-label=Delete]").click()

        browser.driver.refresh()
        choose = browser.find("#import + input")
        choose.send_keys(str(file))
        browser.until(lambda: browser.texts("#conversations .open") == ["first question"])
        assert browser.texts(".message") == shown
        choose.send_keys(str(file))
        browser.until(lambda: browser.texts("#conversations .open") == ["first question"] * 2)
        ask(browser, "second question")
        wait_for_answers(browser, 2)
        assert prompt_of(server.worker.jobs[-1]).startswith('[system]Be brief.""\n[user]first question""\n[assistant]')
        browser.driver.refresh()
        browser.until(lambda: len(browser.all(".message")) == 4)


GOOD = {"title": "x", "messages": [{"role": "user", "content": "Hi"}], "settings": {}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"title": "x", "messages": []}',
        json.dumps(GOOD | {"title": {}}),
        json.dumps(GOOD | {"messages": [None]}),
        json.dumps(GOOD | {"messages": [{"role": "system", "content": "x"}]}),
        json.dumps(GOOD | {"messages": [{"role": "assistant", "content": "x", "rounds": [[1, 2]]}]}),
        json.dumps(GOOD | {"messages": [{"role": "assistant", "content": "x", "rounds": [[1, 2, "3"]]}]}),
        json.dumps(GOOD | {"messages": [{"role": "assistant", "content": "x", "speed": "fast"}]}),
        json.dumps(GOOD | {"messages": [{"role": "assistant", "content": "x", "pending": True}]}),
    ],
)
def test_what_is_no_conversation_is_not_imported(visit, tmp_path, text):
    file = tmp_path / "other.json"
    file.write_text(text, encoding="utf-8")
    with running() as server:
        browser = visit(server)
        browser.find("#import + input").send_keys(str(file))
        browser.until(lambda: "other.json is not a conversation" in browser.text("#notice"))
        assert browser.all("#conversations li") == []


def test_settings_of_an_import_that_are_no_settings_are_left_out(visit, tmp_path):
    file = tmp_path / "good.json"
    wrong = {"temperature": "hot", "system": 3, "draft": "no", "model": None, "other": 1, "__proto__": {"top_p": 0.5}}
    file.write_text(json.dumps(GOOD | {"settings": wrong | {"seed": 7}}), encoding="utf-8")
    with running() as server:
        browser = visit(server)
        browser.find("#import + input").send_keys(str(file))
        browser.until(lambda: browser.texts(".bubble") == ["Hi"])
        ask(browser, "go on")
        wait_for_answers(browser, 1)
        [job] = server.worker.jobs
        assert prompt_of(job) == '[user]Hi\n\ngo on""\n'
        assert (job.params.temperature, job.params.top_p, job.params.seed, job.draft) == (0, 1, 7, True)


def test_what_goes_wrong_is_said_and_can_be_retried(visit):
    worker = FakeWorker(room=0)
    with running(worker) as server:
        browser = visit(server, allow="status of 429")
        ask(browser, "Hi")
        wait_for_answers(browser, 1)
        assert "try again in 7 s" in browser.text(".state.error")
        worker.room, worker.error = 1, RuntimeError("broken")
        browser.find(".answer .actions button").click()
        browser.until(lambda: "server failed" in browser.text(".state.error"))
        assert browser.text(".content") == "Hel", "what had come stays"
        worker.error = None
        browser.find(".answer .actions button").click()
        browser.until(lambda: browser.text(".content") == "Hello there, world.")
        assert not browser.all(".state.error")


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        (1280, False),
        (950, True),
        (390, False),
        (320, True),
    ],
)
def test_nobody_is_left_out(visit, width, dark):
    """axe finds nothing serious, nothing is wider than the screen, and the keyboard reaches everything."""
    spec = importlib.util.find_spec("axe_core_python")
    if spec is None or spec.origin is None:
        pytest.skip("needs axe-core-python: pip install -e '.[dev]'")
    axe = (Path(spec.origin).parent / "axe.min.js").read_text(encoding="utf-8")
    pair = FakePair(tokenizer=FakeTokenizer(has_thinking=True))
    with running(FakeWorker(script=lambda job: f"Hm.</think># Title\n\n{ANSWER}"), pair=pair) as server:
        browser = visit(server, width=width, height=800, dark=dark)
        browser.run(axe)

        def findings():
            script = "return (await axe.run(document, { resultTypes: ['violations'] })).violations"
            found = browser.run_async(f"{script}.map((v) => [v.impact, v.id, v.nodes.map((n) => n.html).join()])")
            return [finding for finding in found if finding[0] in ("serious", "critical")]

        assert findings() == []
        ask(browser, "Hi " + "long-word-" * 30)
        wait_for_answers(browser, 1)
        assert findings() == []
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
        assert browser.run("const e = document.querySelector('.legend'); return e.scrollWidth <= e.clientWidth")
        background = browser.run("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(","))) < 380) == dark
        browser.find("#open-settings").click()
        assert findings() == []
        browser.type(ESCAPE)
        if width < 760:
            browser.find("#menu").click()
            assert findings() == []
            browser.type(ESCAPE)
        reached = set()
        for _ in range(40):
            browser.type(TAB)
            reached.add(browser.run("const a = document.activeElement; return a.id || a.textContent"))
        assert {"draft", "open-settings", "input", "send", "Edit", "Retry", "Copy", "Reasoning"} <= reached
