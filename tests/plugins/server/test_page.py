"""The page in a real browser: by keyboard alone, on a wide screen and a phone, in light and dark."""

import httpx
import pytest

from oarlock.plugins.server.app import PAGE_POLICY

pytestmark = pytest.mark.timeout(180)
CONTRAST = """
(() => {
  const channel = (v) => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const behind = (node) => {
    for (let each = node; each; each = each.parentElement) {
      const colour = parse(getComputedStyle(each).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.getClientRects().length || /SCRIPT|STYLE/.test(node.tagName)) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), walker.currentNode.data.trim().slice(0, 40)]);
  }
  return found;
})()
"""
TEXTS = "[...document.querySelectorAll('.answer .text')].map((each) => each.textContent.length)"


@pytest.fixture(scope="module")
def long_winded(serve, talkative):
    """A server whose answers never end early, so that they can be watched."""
    with serve(talkative, defaults={"temperature": 0.8, "ignore_eos": True}) as box:
        yield box


@pytest.fixture
def page(long_winded, browser):
    """The page, loaded, with the model's name on it."""
    browser.resize(1280, 900)
    browser.prefer("light")
    browser.open(long_winded.url)
    browser.until("document.getElementById('model').textContent.includes('tiny')")
    return browser


def ask(page, tokens=3000):
    """Type a prompt and send it with Enter: the prompt has the focus when the page opens."""
    page.evaluate(f"document.getElementById('tokens').value = {tokens}")
    page.type("the quick brown fox")
    page.press("Enter")


def test_a_prompt_by_keyboard_alone_streams_two_rows(page, settled, long_winded):
    """Text is seen to grow twice in each answer, and the batch beside has two rows that decode."""
    assert page.evaluate("document.activeElement.id") == "prompt"
    ask(page)
    first = page.until(f"(() => {{ const n = {TEXTS}; return n.length === 2 && n.every((each) => each > 0) && n; }})()")
    second = grown(page, first)
    grown(page, second)
    assert page.until("document.getElementById('count').textContent === '2'")
    page.until("[...document.querySelectorAll('.phase.decode')].length === 2")
    page.until("Number(document.getElementById('speed').textContent) > 0")
    assert "KV in full" in page.evaluate("document.getElementById('cache').innerText")
    page.evaluate("document.getElementById('stop').focus()")
    page.press("Enter")
    page.until("document.getElementById('count').textContent === '0'")
    settled(long_winded)


def grown(page, before):
    """Wait until both answers are longer, and return how long they are."""
    grew = f"(() => {{ const n = {TEXTS}, was = {before}; return n.every((each, i) => each > was[i]) && n; }})()"
    return page.until(grew)


def test_the_next_message_carries_the_answer_that_was_picked(page):
    ask(page, tokens=6)
    ended = "[...document.querySelectorAll('.answer footer span')].filter((each) => each.textContent.includes('ended')).length"
    page.until(f"{ended} === 2")
    said = page.evaluate("document.querySelectorAll('.answer .text')[1].textContent")
    page.evaluate("document.querySelectorAll('.answer input')[1].click()")
    page.evaluate("""{ const real = window.fetch; window.fetch = (url, options) => {
        if (options && options.body) window.sent = JSON.parse(options.body);
        return real(url, options); }; }""")
    page.evaluate("document.getElementById('prompt').focus()")
    ask(page, tokens=6)
    page.until(f"{ended} === 4")
    sent = page.evaluate("window.sent.messages")
    assert [message["role"] for message in sent] == ["user", "assistant", "user"]
    assert sent[1]["content"] == said


def test_what_each_layer_is_made_of_is_shown(page):
    shown = page.until("document.getElementById('layers').innerText")
    assert "0 to 1" in shown
    assert "full" in shown


@pytest.mark.parametrize("width", [390, 320, 768, 1280])
def test_no_width_scrolls_sideways(page, width):
    ask(page, tokens=60)
    page.until(f"{TEXTS}.every((each) => each > 20)")
    page.resize(width, 800)
    page.until(f"window.innerWidth === {width}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_written_can_be_read(page, scheme):
    """Contrast of at least 4.5, rows and answers and errors included."""
    ask(page)
    page.until("document.querySelectorAll('.phase').length === 2")
    page.evaluate("document.getElementById('problem').textContent = 'something went wrong'")
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    page.prefer(scheme)
    found = page.evaluate(CONTRAST)
    assert len(found) > 30
    assert not [(text, round(ratio, 2)) for ratio, text in found if ratio < 4.5]
    page.evaluate("document.getElementById('stop').click()")


def test_an_error_is_shown(page):
    page.evaluate("document.getElementById('rows').value = 15")
    page.evaluate("document.getElementById('rows').max = 10000; document.getElementById('rows').value = 9999")
    page.evaluate("document.getElementById('prompt').focus()")
    ask(page)
    assert "9999" in page.until("document.getElementById('problem').textContent")


def test_the_key_is_asked_for(serve, talkative, browser):
    with serve(talkative, key="secret") as box:
        browser.open(box.url)
        browser.until("!document.getElementById('keyline').hidden")
        browser.evaluate("document.getElementById('key').focus()")
        browser.type("secret")
        browser.press("Enter")
        browser.until("document.getElementById('model').textContent.includes('tiny')")


def test_the_page_asks_nobody_else(server):
    """No address of anything outside, and a policy that would stop it."""
    answer = httpx.get(server.url, trust_env=False)
    assert answer.headers["content-security-policy"] == PAGE_POLICY
    assert "http://" not in answer.text
    assert "https://" not in answer.text
    assert "//cdn" not in answer.text
