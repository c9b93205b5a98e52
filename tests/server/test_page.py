"""The page `/` and the API reference `/docs` of `encodle serve`, in headless Chromium.

The fixture `server` (conftest.py) is a running server with the built-in model, without API keys.
The environment variable `CHROMIUM` names the browser; the default is `chromium` or `google-chrome`
on the `PATH`. Without a browser, the tests are skipped. If the environment variable
`PAGE_SCREENSHOTS` names a folder, the tests write screenshots of the pages there.
"""

import json
import math
import os
import re
import shutil
import struct
import urllib.request
from pathlib import Path

import pytest
from conftest import KEYS, MODELS

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
SCREENSHOTS = os.environ.get("PAGE_SCREENSHOTS")
SENTENCES = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The new movie is awesome.",
]
TIMEOUT = 30_000  # ms; the first request may wait for the model


@pytest.fixture(scope="module")
def base(server):
    return server.url + "/"


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium: install it, or set CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Seen:
    """Collects the errors and the requests to other origins, which a page must not cause."""

    def __init__(self, page, base):
        self.errors, self.foreign = [], []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self.on_console)
        page.on("request", lambda request: self.on_request(request.url, base))

    def on_console(self, message):
        # Chromium logs every response with an error status. The tests cause such responses.
        refused = message.text.startswith("Failed to load resource: the server responded")
        if message.type in ("error", "warning") and not refused:
            self.errors.append(message.text)

    def on_request(self, url, base):
        if not url.startswith((base, "data:", "blob:")):
            self.foreign.append(url)


@pytest.fixture
def open_page(browser, base):
    """Opens a page of the server. After the test, there must be no errors in the console and no
    requests to other origins."""
    contexts, all_seen = [], []

    def open_page(path, width=1280, height=900, scheme="light", before=None, base=base):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        context.set_default_timeout(TIMEOUT)
        contexts.append(context)
        page = context.new_page()
        all_seen.append(Seen(page, base))
        if before:
            before(page)
        page.goto(base + path)
        return page

    yield open_page
    for context in contexts:
        context.close()
    for seen in all_seen:
        assert seen.errors == []
        assert seen.foreign == []


def post(base, path, body):
    request = urllib.request.Request(
        base + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def embed(base, texts):
    """The vectors of `texts`, each value rounded to f32 as the page does."""
    return [
        struct.unpack(f"{len(vector)}f", struct.pack(f"{len(vector)}f", *vector))
        for vector in post(base, "embed", {"inputs": texts})
    ]


def cosine(a, b):
    dot = math.fsum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(math.fsum(x * x for x in a) * math.fsum(x * x for x in b))


def number(text):
    """The number in a text of the page, which writes U+2212 for minus."""
    return float(text.replace("\u2212", "-"))


def matrix(page, selector="#compare-result"):
    rows = page.locator(f"{selector} tbody tr")
    return [[number(x) for x in row.locator("td").all_inner_texts()] for row in rows.all()]


def wait_for_compare(page, sentences):
    labels = page.locator("#compare-result tbody th")
    expect(labels).to_have_count(sentences, timeout=TIMEOUT)
    expect(page.locator("#panel-compare")).not_to_have_class(re.compile("busy"))


def wait_for_heads(page):
    page.locator("#heads button").first.wait_for()


def assert_no_horizontal_scroll(page):
    width, inner = page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert width <= inner


def assert_close(found, expected, decimals):
    """The tolerance is half a unit of the last displayed decimal, plus 1e-6 for sums in another
    order."""
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert abs(a - b) <= 0.5 * 10**-decimals + 1e-6, f"element {i}: {a}, expected {b}"


def screenshot(page, name, full_page=True):
    if SCREENSHOTS:
        folder = Path(SCREENSHOTS)
        folder.mkdir(parents=True, exist_ok=True)
        page.mouse.move(0, 0)
        page.screenshot(path=folder / f"{name}.png", full_page=full_page)


def test_compare_shows_the_cosines_of_the_vectors_of_the_server(open_page, base):
    page = open_page("")
    wait_for_compare(page, 3)
    assert page.locator("#compare-text").input_value().split("\n") == SENTENCES
    vectors = embed(base, SENTENCES)
    found = matrix(page)
    for i, row in enumerate(found):
        assert_close(row, [cosine(vectors[i], other) for other in vectors], 3)

    # A new sentence is added to the table.
    sentences = [*SENTENCES, "Someone is having lunch."]
    page.fill("#compare-text", "\n".join(sentences))
    wait_for_compare(page, 4)
    vectors = embed(base, sentences)
    for i, row in enumerate(matrix(page)):
        assert_close(row, [cosine(vectors[i], other) for other in vectors], 3)


def test_compare_shows_a_tooltip_and_moves_with_the_arrow_keys(open_page, base):
    page = open_page("#compare")
    wait_for_compare(page, 3)
    cells = page.locator("#compare-result td[role=gridcell]")
    cells.nth(0).focus()
    page.keyboard.press("ArrowRight")
    expect(cells.nth(1)).to_be_focused()
    tip = page.locator("#tip")
    expect(tip).to_contain_text(SENTENCES[0])
    expect(tip).to_contain_text(SENTENCES[1])
    first, second = embed(base, SENTENCES[:2])
    assert_close([number(tip.locator("strong").inner_text())], [cosine(first, second)], 6)
    page.keyboard.press("ArrowDown")
    expect(cells.nth(4)).to_be_focused()
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def test_only_new_texts_are_sent(open_page):
    page = open_page("#compare")
    wait_for_compare(page, 3)
    with page.expect_request("**/embed") as sent:
        page.fill("#compare-text", "\n".join([*SENTENCES, "It is raining."]))
    assert sent.value.post_data_json["inputs"] == ["It is raining."]
    wait_for_compare(page, 4)


def test_search_sorts_the_lines_by_cosine(open_page, base):
    page = open_page("#search")
    page.locator("#search-result li").first.wait_for()
    lines = [*SENTENCES, "The girl is carrying a baby.", "A man is riding a horse."]
    query = "someone is having lunch"
    page.fill("#search-text", "\n".join(lines))
    page.fill("#search-query", query)
    expect(page.locator("#search-result li")).to_have_count(len(lines))
    wanted, *vectors = embed(base, [query, *lines])
    expected = sorted(
        ((cosine(wanted, vector), line) for vector, line in zip(vectors, lines, strict=True)),
        reverse=True,
    )
    assert page.locator("#search-result .line").all_inner_texts() == [x for _, x in expected]
    scores = [number(x) for x in page.locator("#search-result .score").all_inner_texts()]
    assert_close(scores, [score for score, _ in expected], 4)

    # Another query is answered as it is typed.
    page.locator("#search-query").fill("")
    page.locator("#search-query").press_sequentially("a film", delay=20)
    expect(page.locator("#search-result .line").first).to_have_text(SENTENCES[2])


def test_all_found_lines_are_shown_on_request(open_page):
    page = open_page("#search")
    lines = [f"sentence {i}" for i in range(102)]
    page.fill("#search-text", "\n".join(lines))
    found = page.locator("#search-result li")
    expect(found).to_have_count(100)
    page.get_by_role("button", name="Show all 102 lines").click()
    expect(found).to_have_count(102)
    expect(found.nth(100)).to_be_focused()


def test_attention_shows_the_weights_of_the_selected_head(open_page, base):
    page = open_page("#attention")
    wait_for_heads(page)
    response = post(base, "attention", {"inputs": "I love AI", "format": "json"})
    tokens, weights = response["tokens"], response["weights"]
    heads = page.locator("#heads button")
    expect(heads).to_have_count(len(weights) * (len(weights[0]) + 1))  # one mean per layer
    layer, head = len(weights) - 1, len(weights[0]) - 1
    page.get_by_label(f"Layer {layer}, head {head}", exact=True).click()
    expect(page.locator("#head-title")).to_have_text(f"Layer {layer}, head {head}")
    assert page.locator("#head-matrix tbody th").all_inner_texts() == tokens
    for found, expected in zip(matrix(page, "#head-matrix"), weights[layer][head], strict=True):
        assert_close(found, expected, 2)

    # The tooltip of a cell has four decimals.
    page.locator("#head-matrix td[role=gridcell]").nth(1).hover()
    assert_close(
        [number(page.locator("#tip strong").inner_text())], [weights[layer][head][0][1]], 4
    )

    # The lines start at the token that is selected.
    page.get_by_label(f"token 3: {tokens[2]}", exact=True).click()
    expect(page.locator("#arcs-title")).to_contain_text(tokens[2])
    shown = [number(x) for x in page.locator("#head-arcs .weight").all_text_contents()]
    assert_close(shown, weights[layer][head][2], 2)
    assert page.locator("#head-arcs path").count() > 0


def test_attention_accepts_a_second_text(open_page, base):
    page = open_page("#attention")
    wait_for_heads(page)
    page.fill("#attention-pair", "So do I")
    tokens = post(base, "attention", {"inputs": "I love AI", "pair": "So do I"})["tokens"]
    expect(page.locator("#head-matrix tbody th")).to_have_count(len(tokens))
    assert page.locator("#head-matrix tbody th").all_inner_texts() == tokens


def test_attention_refuses_a_text_that_is_too_long_to_draw(open_page):
    page = open_page("#attention")
    wait_for_heads(page)
    page.fill("#attention-text", "word " * 200)
    error = page.locator("#attention-error")
    expect(error).to_have_text("This page takes at most 128 tokens: the text has 202.")
    page.fill("#attention-text", "A short text")
    expect(page.locator("#attention-error")).to_be_hidden()


def test_each_tab_says_its_limit_and_the_model_s_in_the_same_words(open_page, models):
    page = open_page("#compare", base=models.url + "/")
    wait_for_compare(page, 3)
    for tab, limit in (
        ("compare", "100 lines"), ("search", "10,000 lines"), ("rerank", "100 lines"),
        ("classify", "100 lines"), ("attention", "128 tokens"),
    ):
        expect(page.locator(f"#{tab}-limit")).to_have_text(f"This page takes at most {limit}.")
    for tab in ("compare", "search", "attention"):
        expect(page.locator(f"#{tab}-model-hint")).to_contain_text("up to 256 tokens")


def test_a_wide_table_says_which_columns_are_visible(open_page):
    page = open_page("#compare")
    wait_for_compare(page, 3)
    box = page.locator("#compare-result .scroller")
    hint = box.locator(".hint")
    expect(hint).to_be_hidden()
    page.fill("#compare-text", "\n".join(f"sentence {i}" for i in range(60)))
    wait_for_compare(page, 60)
    expect(hint).to_have_text(re.compile("^Columns 1 to 3[0-9] of 60. Scroll sideways"))
    expect(box).to_have_class("scroller more-right")
    last = int(hint.inner_text().split()[3])
    # All of the last column that the hint names is visible, the next one is not.
    heads = page.locator("#compare-result thead th")
    right = page.evaluate("document.querySelector('#compare-result .scroll').getBoundingClientRect().right")
    edge = lambda i: (lambda at: at["x"] + at["width"])(heads.nth(i).bounding_box())
    assert edge(last - 1) < right + 1 <= edge(last)
    screenshot(page, "compare-wide-light-1280")
    scroll = "document.querySelector('#compare-result .scroll').scrollLeft = "
    page.evaluate(scroll + "100")
    expect(box).to_have_class("scroller more-right more-left")
    page.evaluate(scroll + "10000")
    expect(hint).to_have_text(re.compile("^Columns [0-9]+ to 60 of 60"))
    expect(box).to_have_class("scroller more-left")


@pytest.mark.parametrize("width", [360, 1280])
def test_the_attention_of_a_long_text_says_which_columns_are_visible(open_page, width):
    page = open_page("#attention", width=width)
    wait_for_heads(page)
    page.fill("#attention-text", "word " * 120)
    expect(page.locator("#head-matrix tbody th")).to_have_count(122)
    matrix_hint = page.locator("#head-matrix .scroller > .hint")
    expect(matrix_hint).to_have_text(re.compile("^Columns 1 to [0-9]+ of 122. Scroll"))
    heads_hint = page.locator("#attention-result .scroller > .hint").first
    if width == 360:  # 12 heads and the mean do not fit
        expect(heads_hint).to_have_text(re.compile("^Columns 1 to ([1-9]|1[0-2]) of 13. Scroll"))
    else:
        expect(heads_hint).to_be_hidden()


def tabs(page):
    """The names of the tabs that are offered."""
    return [tab for tab in page.get_by_role("tab").all_inner_texts() if tab]


def test_a_tab_is_offered_if_a_model_can_do_its_task(open_page, models):
    page = open_page("")
    wait_for_compare(page, 3)
    assert tabs(page) == ["Compare", "Search", "Attention"]
    page = open_page("", base=models.url + "/")
    wait_for_compare(page, 3)
    assert tabs(page) == ["Compare", "Search", "Rerank", "Classify", "Tag", "Answer", "Attention"]
    for tab in ("Search", "Rerank"):  # the arrow key moves from the tab that is shown
        page.get_by_role("tab", selected=True).press("ArrowRight")
        expect(page.get_by_role("tab", selected=True)).to_have_text(tab)
    expect(page.locator("#panel-rerank")).to_be_visible()


def test_a_server_with_only_a_ranker_starts_with_rerank(open_page, serve):
    ranker = serve(f"--model=ranker={MODELS['ranker']}")
    for path in ("", "#compare"):
        page = open_page(path, base=ranker.url + "/")
        expect(page.locator("#rerank-result li")).to_have_count(6)
        assert tabs(page) == ["Rerank", "Attention"]
        expect(page.locator("#panel-compare")).to_be_hidden()
        expect(page.get_by_role("tab", selected=True)).to_have_text("Rerank")
    screenshot(page, "rerank-light-1280")


def test_rerank_sorts_the_lines_by_relevance(open_page, models):
    page = open_page("#rerank", base=models.url + "/")
    lines = [f"{i} {line}" for i, line in enumerate(SENTENCES * 7)]  # several requests
    page.fill("#rerank-text", "\n".join([*lines, "long " * 200]))
    page.fill("#rerank-query", "who eats?")
    body = {"model": "ranker", "query": "who eats?", "texts": [*lines, "long " * 200], "truncate": True}
    ranks = models.json("/rerank", body)
    expect(page.locator("#rerank-result li")).to_have_count(22)
    expect(page.locator("#rerank-status")).to_contain_text("22 lines")
    scores = [number(x) for x in page.locator("#rerank-result .score").all_inner_texts()]
    assert_close(scores, [rank["score"] for rank in ranks], 4)
    shown = page.locator("#rerank-result .line").all_inner_texts()
    assert [line.strip() for line in shown] == [body["texts"][rank["index"]].strip() for rank in ranks]


def test_classify_shows_the_labels_by_score(open_page, models):
    page = open_page("#classify", base=models.url + "/")
    page.fill("#classify-text", f"{SENTENCES[0]}\n\n{SENTENCES[2]}")
    items = page.locator("#classify-result li")
    expect(items).to_have_count(2)
    assert items.locator(".rank").all_inner_texts() == ["1", "3"]  # the numbers of the lines
    expected = models.json("/classify", {"inputs": [SENTENCES[0], SENTENCES[2]]})
    for item, result in zip(items.all(), expected, strict=True):
        scores = sorted(result["scores"].items(), key=lambda pair: -pair[1])
        assert item.locator(".labels .line").all_inner_texts() == [label for label, _ in scores]
        found = [number(x) for x in item.locator(".score").all_inner_texts()]
        assert_close(found, [score for _, score in scores], 4)
    page.fill("#classify-text", "\n".join(f"line {i}" for i in range(103)))
    expect(items).to_have_count(100)
    left_out = "This page takes at most 100 lines: the last 3 lines are left out."
    expect(page.locator("#classify-error")).to_have_text(left_out)


def test_tag_marks_the_parts_of_the_text(open_page, models):
    page = open_page("#tag", base=models.url + "/")
    text = "\U0001f600 a bad <b>cab</b> and\na bead"  # start and end count code points
    page.fill("#tag-text", text)
    [tagged] = models.json("/tag", {"inputs": text})
    assert tagged["entities"], "the test needs an entity"
    marks = page.locator("#tag-result mark")
    expect(page.locator("#tag-result li")).to_have_count(len(tagged["entities"]))
    shown = marks.evaluate_all(
        "marks => marks.map(mark => [mark.firstChild.textContent, mark.lastChild.textContent])"
    )
    assert shown == [[entity["text"], entity["label"]] for entity in tagged["entities"]]
    without_labels = page.locator("#tag-result .passage").evaluate(
        "all => { const copy = all.cloneNode(true); copy.querySelectorAll('b').forEach(b => b.remove());"
        " return copy.textContent; }"
    )
    assert without_labels == text


def test_answer_marks_the_best_answer(open_page, models):
    page = open_page("#answer", base=models.url + "/")
    text, question = "a bad cab and a bead", "a cab?"
    page.fill("#answer-text", text)
    page.fill("#answer-question", question)
    body = {"question": question, "inputs": text, "top": 3}
    [answered] = models.json("/answer", body)
    best = answered["answers"][0]
    expect(page.locator("#answer-result mark")).to_have_text(best["text"])
    expect(page.locator("#answer-result .passage")).to_have_text(text)
    scores = [number(x) for x in page.locator("#answer-result .score").all_inner_texts()]
    assert_close(scores, [answer["score"] for answer in answered["answers"]], 4)
    expect(page.locator("#answer-result .hint")).to_contain_text(f"{answered['no_answer']:.4f}")
    page.fill("#answer-question", "")
    expect(page.locator("#answer-result")).to_have_text("Enter a question.")


def test_a_refused_text_is_named_and_the_others_are_compared(open_page, base):
    page = open_page("#compare")
    wait_for_compare(page, 3)
    longest = max(
        model["max_input_length"]
        for model in json.load(urllib.request.urlopen(base + "info"))["models"]
    )
    long = "word " * (longest + 8)
    page.fill("#compare-text", "\n".join([SENTENCES[0], "", long, SENTENCES[1]]))
    error = page.locator("#compare-error")
    expect(error).to_contain_text("Line 3: the text has")
    wait_for_compare(page, 2)
    vectors = embed(base, SENTENCES[:2])
    assert_close(matrix(page)[0], [cosine(vectors[0], other) for other in vectors], 3)
    screenshot(page, "compare-error-light-1280")

    # The error disappears when the text is corrected.
    page.fill("#compare-text", "\n".join(SENTENCES))
    wait_for_compare(page, 3)
    expect(error).to_be_hidden()


def test_many_refused_lines_do_not_hide_the_others(open_page, base):
    page = open_page("#search")
    lines = [*SENTENCES, *(f"{i} " + "word " * 2000 for i in range(60))]
    page.fill("#search-text", "\n".join(lines))
    page.fill("#search-query", "a film")
    expect(page.locator("#search-error li")).to_have_count(31)
    expect(page.locator("#search-error")).to_contain_text("30 more errors")
    expect(page.locator("#search-result .line").first).to_have_text(SENTENCES[2])


def test_a_query_gets_the_prompt_named_query_of_its_model(browser, models):
    page = browser.new_page()
    page.goto(models.url + "/#search")
    page.select_option("#search-model", "sentences")
    page.fill("#search-text", "\n".join(SENTENCES))
    page.fill("#search-query", SENTENCES[0])
    expect(page.locator("#search-result li")).to_have_count(len(SENTENCES))
    body = {"model": "sentences", "inputs": [SENTENCES[0]]}
    [query] = models.json("/embed", body | {"prompt_name": "query"})
    vectors = models.json("/embed", body | {"inputs": SENTENCES})
    expected = sorted((cosine(query, vector) for vector in vectors), reverse=True)
    shown = page.locator("#search-result .score")
    expect(shown.first).to_have_text(f"{expected[0]:.4f}".replace("-", "\u2212"))
    assert_close([number(x) for x in shown.all_inner_texts()], expected, 4)
    page.close()


def test_a_key_that_is_not_ascii_is_refused(browser, keyed):
    page = browser.new_page()
    page.goto(keyed.url)
    page.fill("#key", "abc\u2026")
    page.locator("#key").press("Enter")
    expect(page.locator("#key-hint")).to_contain_text("not ASCII")
    page.fill("#key", KEYS[0])
    page.locator("#key").press("Enter")
    expect(page.locator("#key-form")).to_be_hidden()
    wait_for_compare(page, 3)
    page.close()


def test_an_error_stays_until_the_next_attempt_succeeds(open_page):
    page = open_page("#compare")
    wait_for_compare(page, 3)
    failure = {"error": "the computation failed", "error_type": "Backend"}
    page.route("**/embed", lambda route: route.fulfill(status=424, json=failure))
    page.fill("#compare-text", "A sentence.\nAnother sentence.")
    error, panel = page.locator("#compare-error"), page.locator("#panel-compare")
    for attempts in (1, 2):
        expect(error).to_contain_text("the computation failed")
        expect(panel).to_have_class(re.compile("failed"))  # the earlier result is dimmed
        assert len(matrix(page)) == 3
        if attempts == 1:
            with page.expect_request("**/embed"):
                error.get_by_role("button", name="Try again").click()
    page.unroute("**/embed")
    error.get_by_role("button", name="Try again").click()
    wait_for_compare(page, 2)
    expect(error).to_be_hidden()
    expect(panel).not_to_have_class(re.compile("failed"))


class Refusals:
    """Refuses the first `refused` requests with `retry-after: 1`, and counts all requests."""

    def __init__(self, refused, status, message):
        self.refused, self.status, self.message = refused, status, message
        self.requests = 0

    def __call__(self, route):
        self.requests += 1
        if self.requests > self.refused:
            return route.fallback()
        body = {"error": self.message, "error_type": "Unhealthy"}
        return route.fulfill(status=self.status, json=body, headers={"retry-after": "1"})


def test_a_busy_server_is_asked_again(open_page):
    page = open_page("#compare")
    wait_for_compare(page, 3)
    refusals = Refusals(1, 429, "too many requests")
    page.route("**/embed", refusals)
    page.fill("#compare-text", "A sentence.\nAnother sentence.")
    expect(page.locator("#compare-status")).to_contain_text("busy")
    wait_for_compare(page, 2)
    assert refusals.requests == 2


def test_the_page_waits_for_a_server_that_loads_its_models(open_page):
    refusals = Refusals(4, 503, "the models are not loaded yet")
    page = open_page("#compare", before=lambda page: page.route("**/info", refusals))
    expect(page.locator("#start-status")).to_contain_text("not ready")
    wait_for_compare(page, 3)
    expect(page.locator("#start-status")).to_have_text("")


def test_a_request_that_takes_too_long_is_divided(open_page, base):
    page = open_page("#compare")
    wait_for_compare(page, 3)
    sizes = []

    def respond(route):
        sizes.append(len(route.request.post_data_json["inputs"]))
        if sizes[-1] == 1:
            return route.fallback()
        body = {"error": "the time limit is exceeded", "error_type": "Timeout"}
        return route.fulfill(status=408, json=body)

    page.route("**/embed", respond)
    sentences = ["one", "two", "three", "four"]
    page.fill("#compare-text", "\n".join(sentences))
    wait_for_compare(page, 4)
    assert sizes == [4, 2, 1, 1, 2, 1, 1]
    vectors = embed(base, sentences)
    assert_close(matrix(page)[3], [cosine(vectors[3], other) for other in vectors], 2)


def test_models_that_the_server_loads_later_are_offered(open_page, models):
    info = json.load(urllib.request.urlopen(models.url + "/info"))
    embedding = [model for model in info["models"] if model["task"] == "embedding"]
    assert len(embedding) > 1
    shown = [embedding[:1]]

    def respond(route):
        route.fulfill(json=info | {"models": shown[0]})

    base = models.url + "/"
    page = open_page("#compare", base=base, before=lambda page: page.route("**/info", respond))
    wait_for_compare(page, 3)
    expect(page.locator("#compare-model option")).to_have_count(1)
    shown[0] = embedding[1:]
    with page.expect_request("**/embed") as sent:
        page.fill("#compare-text", "A sentence.\nAnother sentence.")
    assert sent.value.post_data_json["model"] == embedding[1]["name"]
    wait_for_compare(page, 2)
    expect(page.locator("#compare-model option")).to_have_count(len(embedding) - 1)


def test_markup_in_texts_is_shown_as_text(open_page):
    markup = "<img src=x onerror=\"document.title='changed'\">"
    page = open_page("#compare")
    wait_for_compare(page, 3)
    page.fill("#compare-text", f"{markup}\n{SENTENCES[0]}")
    wait_for_compare(page, 2)
    expect(page.locator("#compare-result tbody th").first).to_contain_text(markup)
    page.get_by_role("tab", name="Search").click()
    page.fill("#search-text", markup)
    expect(page.locator("#search-result .line")).to_have_count(1)
    expect(page.locator("#search-result .line")).to_have_text(markup)
    page.get_by_role("tab", name="Attention").click()
    page.fill("#attention-text", "<img> & <b>")
    expect(page.locator("#head-matrix tbody th").nth(1)).to_have_text("<")
    assert page.locator("img").count() == 0
    assert "changed" not in page.title()


@pytest.mark.parametrize("path", ["", "docs"])
def test_a_stored_key_that_no_header_can_hold_is_not_sent(open_page, path):
    page = open_page(path)
    page.evaluate("sessionStorage.setItem('bert-api-key', 'abc\u2026')")
    page.reload()
    if path == "docs":
        page.locator(".operation").first.wait_for()
    else:
        wait_for_compare(page, 3)


def test_the_api_reference_refuses_a_key_that_is_not_ascii(browser, keyed):
    page = browser.new_page()
    page.goto(keyed.url + "/docs")
    page.fill("#key", "abc\u2026")
    page.locator("#key").press("Enter")
    expect(page.locator("#key-hint")).to_contain_text("not ASCII")
    page.fill("#key", KEYS[0])
    page.locator("#key").press("Enter")
    page.locator(".operation").first.wait_for()
    page.close()


def test_the_contents_of_the_api_reference_are_shown_if_the_page_becomes_wide(open_page):
    page = open_page("docs", width=600)
    page.locator(".operation").first.wait_for()
    expect(page.locator("#nav")).to_be_hidden()
    page.set_viewport_size({"width": 1280, "height": 900})
    expect(page.locator("#nav")).to_be_visible()


def test_the_api_reference_is_folded_on_a_phone(open_page):
    page = open_page("docs", width=360, height=740)
    operation = page.locator("#post-embed")
    operation.wait_for()
    assert page.evaluate("document.documentElement.scrollHeight") < 6000
    fields = operation.locator(".fields")
    expect(fields).to_be_hidden()
    operation.locator("summary").first.click()
    expect(fields).to_be_visible()
    assert_no_horizontal_scroll(page)
    screenshot(page, "docs-operation-light-360", full_page=False)

    # The list of routes stays at the top of the window, and opens the operation that it names.
    page.evaluate("scrollTo(0, 3000)")
    contents = page.locator("#contents > summary")
    assert contents.bounding_box()["y"] == 0
    contents.click()
    page.locator("#nav a[href='#post-tag']").click()
    expect(page.locator("#nav")).to_be_hidden()
    expect(page.locator("#post-tag .fields").first).to_be_visible()
    top = page.locator("#post-tag h3").bounding_box()["y"]
    assert contents.bounding_box()["height"] <= top < 200, "the title is below the list of routes"

    # On a wide page, everything is open and stays open.
    page.set_viewport_size({"width": 1280, "height": 900})
    expect(page.locator("#post-answer .fields").first).to_be_visible()
    page.locator("#post-answer > summary").click()
    expect(page.locator("#post-answer .fields").first).to_be_visible()


@pytest.mark.parametrize("path", ["", "docs"])
def test_a_page_may_use_its_own_content_and_the_routes_of_its_server_only(base, path):
    with urllib.request.urlopen(base + path) as response:
        policy = response.headers["content-security-policy"].split("; ")
        html = response.read().decode()
    assert {"default-src 'none'", "connect-src 'self'", "img-src data:"} <= set(policy)
    assert not any("http" in directive or "*" in directive for directive in policy)
    assert "apiKey = {" in html and "--accent:" in html  # common.js and common.css


def test_a_new_text_aborts_the_request_in_progress(open_page):
    page = open_page("#compare")
    wait_for_compare(page, 3)
    held = []

    def respond(route):
        if not held:
            held.append(route)  # never answered
        else:
            route.fallback()

    page.route("**/embed", respond)
    with page.expect_event("requestfailed") as failed:
        page.fill("#compare-text", "first\nsecond\nthird\nfourth")
        expect(page.locator("#panel-compare")).to_have_class(re.compile("busy"))
        page.fill("#compare-text", "one\ntwo")
    assert "first" in failed.value.post_data_json["inputs"]
    wait_for_compare(page, 2)
    expect(page.locator("#compare-error")).to_be_hidden()


def test_the_page_asks_for_the_api_key_and_sends_it(open_page):
    keys = []

    def check(route):
        key = route.request.headers.get("authorization")
        keys.append(key)
        if key == "Bearer right":
            return route.fallback()
        body = {"error": "the API key is missing or wrong", "error_type": "Unauthorized"}
        return route.fulfill(status=401, json=body)

    def before(page):
        page.route(re.compile("/(info|embed)$"), check)

    page = open_page("#compare", before=before)
    form = page.locator("#key-form")
    expect(form).to_be_visible()
    page.fill("#key", "wrong")
    page.locator("#key-form button").click()
    expect(page.locator("#key-hint")).to_contain_text("refused")
    page.fill("#key", "right")
    page.locator("#key-form button").click()
    wait_for_compare(page, 3)
    expect(form).to_be_hidden()
    assert keys[0] is None and "Bearer wrong" in keys and keys[-1] == "Bearer right"


def test_each_tab_offers_the_models_whose_task_fits(open_page, models):
    info = json.load(urllib.request.urlopen(models.url + "/info"))
    names = [model["name"] for model in info["models"]]
    embedding = [model["name"] for model in info["models"] if model["task"] == "embedding"]
    assert 0 < len(embedding) < len(names)
    page = open_page("#compare", base=models.url + "/")
    wait_for_compare(page, 3)

    def options(tab):
        values = "options => options.map(option => option.value)"
        return page.locator(f"#{tab}-model option").evaluate_all(values)

    assert options("compare") == embedding
    assert options("search") == embedding
    assert options("attention") == names


@pytest.mark.parametrize("width", [360, 390, 820, 1280, 1600])
def test_no_page_scrolls_horizontally(open_page, width):
    page = open_page("#compare", width=width)
    wait_for_compare(page, 3)
    assert_no_horizontal_scroll(page)
    page.get_by_role("tab", name="Search").click()
    page.locator("#search-result li").first.wait_for()
    assert_no_horizontal_scroll(page)
    page.get_by_role("tab", name="Attention").click()
    wait_for_heads(page)
    assert_no_horizontal_scroll(page)
    page.fill("#attention-text", "word " * 60)
    expect(page.locator("#head-matrix tbody th")).to_have_count(62)
    assert_no_horizontal_scroll(page)
    page.get_by_role("tab", name="Compare").click()
    page.fill("#compare-text", "\n".join(["x" * 200, *(f"sentence {i}" for i in range(100))]))
    wait_for_compare(page, 100)
    left_out = "This page takes at most 100 lines: the last 1 line is left out."
    expect(page.locator("#compare-error")).to_have_text(left_out)
    assert_no_horizontal_scroll(page)
    page = open_page("docs", width=width)
    page.locator(".operation").first.wait_for()
    assert_no_horizontal_scroll(page)


def test_the_api_reference_lists_every_operation(open_page, base):
    document = json.load(urllib.request.urlopen(base + "openapi.json"))
    expected = {
        f"{method.upper()} {path}"
        for path, operations in document["paths"].items()
        for method in operations
        if method in ("get", "post", "put", "patch", "delete", "head", "options")
    }
    page = open_page("docs")
    page.locator(".operation").first.wait_for()
    titles = page.locator(".operation h3").evaluate_all(
        "titles => titles.map(title => [...title.childNodes].map(node => node.textContent).join(' '))"
    )
    assert set(titles) == expected
    assert len(titles) == len(expected)
    screenshot(page, "docs-whole-light-1280")


def test_the_api_reference_sends_a_request_and_shows_the_response(open_page, base):
    page = open_page("docs#post-embed")
    operation = page.locator("#post-embed")
    operation.locator(".try summary").click()
    body = {"inputs": ["It's raining.", SENTENCES[0]]}
    operation.locator("textarea").fill(json.dumps(body))
    curl = operation.locator(".panel pre").first
    expect(curl).to_contain_text(f"{base}embed")
    expect(curl).to_contain_text("It'\\''s raining.")  # quoted for the shell
    operation.get_by_role("button", name="Send").click()
    response = operation.locator(".response")
    expect(response.locator("header")).to_contain_text("200")
    assert len(response.locator("pre").inner_text()) <= 4000
    response.get_by_role("button", name="Show all").click()
    assert json.loads(response.locator("pre").inner_text()) == post(base, "embed", body)

    operation.locator("textarea").fill("{")
    operation.get_by_role("button", name="Send").click()
    expect(operation.locator(".error")).to_contain_text("not JSON")


def test_copying_a_response_copies_all_of_it(open_page, base):
    page = open_page("docs#post-embed")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    operation = page.locator("#post-embed")
    operation.locator(".try summary").click()
    body = {"inputs": SENTENCES}
    operation.locator("textarea").fill(json.dumps(body))
    operation.get_by_role("button", name="Send").click()
    operation.locator(".response").get_by_role("button", name="Copy response").click()
    expect(operation.get_by_role("button", name="Copied")).to_be_visible()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert json.loads(copied) == post(base, "embed", body)


@pytest.mark.skipif(not SCREENSHOTS, reason="PAGE_SCREENSHOTS is not set")
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light")])
def test_screenshots(open_page, width, scheme):
    page = open_page("#compare", width=width, scheme=scheme)
    wait_for_compare(page, 3)
    screenshot(page, f"compare-{scheme}-{width}")
    page.goto(page.url.split("#")[0] + "#search")
    page.locator("#search-result li").first.wait_for()
    screenshot(page, f"search-{scheme}-{width}")
    page.goto(page.url.split("#")[0] + "#attention")
    wait_for_heads(page)
    page.locator("#heads button").nth(21).click()
    screenshot(page, f"attention-{scheme}-{width}")
    page = open_page("docs", width=width, scheme=scheme)
    page.locator(".operation").first.wait_for()
    screenshot(page, f"docs-{scheme}-{width}", full_page=False)
