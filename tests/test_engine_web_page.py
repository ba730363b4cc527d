"""The page at `/`: served whole, consistent in itself, and used as a person uses it where there is a browser."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from browser import CHROMIUM, Browser
from checkpoints import checkpoint
from daemon import Daemon, free_port

WEB = Path(__file__).parent.parent / "engine" / "web"
KEY = "open-sesame"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    flags = ["--device", "cpu", "--kv-cache-memory", "8MiB", "--served-model-name", "<b>tiny</b>", "--api-key", KEY]
    with Daemon(str(checkpoint("llama")), *flags, "--http", f"127.0.0.1:{free_port()}") as daemon:
        yield daemon


def test_the_files_are_served_without_a_key(daemon: Daemon) -> None:
    kinds = {"": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
    for path, kind in kinds.items():
        answer = httpx.get(f"{daemon.http}/{path}")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert answer.content == (WEB / (path or "index.html")).read_bytes()
    assert {file.name for file in WEB.iterdir()} == {"index.html", "page.css", "page.js"}


def test_the_files_fit_each_other() -> None:
    html, script = (WEB / "index.html").read_text(), (WEB / "page.js").read_text()
    assert set(re.findall(r'\bat\("([\w-]+)"\)', script)) <= set(re.findall(r'\bid="([\w-]+)"', html))
    for forbidden in ("innerHTML", "outerHTML", "document.write", "eval(", "//cdn", "http://", "https://"):
        assert forbidden not in html + script
    assert not re.search(r"<script>|<style|\son\w+=|style=", html), "the content security policy forbids it"
    if node := shutil.which("node"):
        subprocess.run([node, "--check", str(WEB / "page.js")], check=True)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_chat_in_the_browser(daemon: Daemon, tmp_path: Path) -> None:
    with Browser(tmp_path) as browser:
        browser.open(daemon.http)
        browser.wait_for("document.readyState == 'complete' && !document.getElementById('key-form').hidden")
        browser.run(
            f"document.getElementById('key').value = '{KEY}'; document.getElementById('key-form').requestSubmit()"
        )
        # What the model is called is text and no markup.
        browser.wait_for("document.getElementById('model').textContent == '<b>tiny</b>'")
        browser.wait_for("document.getElementById('key-form').hidden")
        browser.wait_for("document.getElementById('running').textContent == '0'")
        browser.errors.clear()  # the 401s of before

        browser.run(
            "document.getElementById('max-tokens').value = 40; document.getElementById('temperature').value = 0;"
            "document.getElementById('prompt').value = '<i>the cat</i>';"
            "const enter = new KeyboardEvent('keydown', {key: 'Enter', bubbles: true});"
            "document.getElementById('prompt').dispatchEvent(enter)"
        )
        footer = browser.wait_for("document.querySelector('article.assistant footer')?.textContent")
        assert re.fullmatch(r"\d+ tokens · first after \d+ ms · \d+ tokens/s", footer)
        assert browser.run("document.querySelector('article.user div').textContent") == "<i>the cat</i>"
        body = {"messages": [{"role": "user", "content": "<i>the cat</i>"}], "max_tokens": 40, "temperature": 0}
        headers = {"authorization": f"Bearer {KEY}"}
        answer = httpx.post(f"{daemon.http}/v1/chat/completions", json=body, headers=headers, timeout=30).json()
        wanted = answer["choices"][0]["message"]["content"]
        assert browser.run("document.querySelector('article.assistant div').textContent") == wanted
        assert browser.wait_for("parseFloat(document.getElementById('rate').textContent) >= 0 ? 'yes' : ''") == "yes"

        browser.run(
            "document.getElementById('max-tokens').value = 9999; document.getElementById('prompt').value = 'x';"
            "document.getElementById('ask').requestSubmit()"
        )
        said = browser.wait_for("document.querySelector('article.error footer')?.textContent")
        assert "max_tokens is 9999" in said

        browser.run("document.getElementById('forget').click()")
        assert browser.run("document.querySelectorAll('article').length") == 0
        browser.run(
            "document.getElementById('max-tokens').value = 4; document.getElementById('prompt').value = 'what is it?';"
            "const clipboardData = new DataTransfer();"
            "clipboardData.items.add(new File([new Uint8Array([1])], '<a>.png', {type: 'image/png'}));"
            "document.getElementById('prompt').dispatchEvent(new ClipboardEvent('paste', {clipboardData}));"
            "document.getElementById('ask').requestSubmit()"
        )
        said = browser.wait_for("document.querySelector('article.error footer')?.textContent")
        assert "the prompt brings 1 image; want text alone" in said  # this model sees nothing
        assert browser.run("document.querySelector('article.user div').textContent") == "[<a>.png] what is it?"
        assert not [error for error in browser.errors if "400" not in error]
