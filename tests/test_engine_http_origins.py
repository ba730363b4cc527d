"""Pages of other origins read the HTTP door where it allows that, as a real browser decides, and nowhere else."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from browser import CHROMIUM, Browser
from covering import long
from daemon import Daemon, free_port
from tercet.engine.config import EngineConfig

KEY = "open-sesame"
ASK = """(async () => {
    try {
        const options = {method: 'POST', headers: {'Content-Type': 'application/json', 'Authorization': 'Bearer KEY'},
                         body: JSON.stringify({prompt: [5, 6], max_tokens: 3, ignore_eos: true})};
        const answer = await fetch('URL/v1/completions', options);
        const said = await answer.json();
        return [answer.status, answer.headers.get('x-request-id') !== null, said.usage?.completion_tokens ?? null];
    } catch (error) { return String(error); }
})()"""
SAID, SILENT = [200, True, 3], "TypeError: Failed to fetch"


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<title>a page</title>")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    """The origin of a page that is not the door's."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("allowed", [long("none"), "others", "this", long("all")])
def test_in_a_browser(allowed: str, page: str, ids_only_model: Path, tmp_path: Path) -> None:
    origins = {"none": [], "others": ["https://chat.example.com"], "this": ["https://a.b", page], "all": ["*"]}[allowed]
    flags = ["--load-format", "null", "--http", f"127.0.0.1:{free_port()}", "--api-key", KEY]
    flags += ["--allowed-origins", *origins] if origins else []
    with Daemon(str(ids_only_model), *flags) as daemon, Browser(tmp_path) as browser:
        browser.open(page)
        browser.wait_for("document.title == 'a page'")
        asked = ASK.replace("URL", daemon.http).replace("KEY", KEY)
        assert browser.run(asked) == (SAID if allowed in ("this", "all") else SILENT)
        if allowed in ("this", "all"):  # errors are read, too
            assert browser.run(asked.replace(KEY, "another-key"))[0] == 401
            assert browser.run(asked.replace("[5, 6]", "-1"))[0] == 400


def test_what_is_said(ids_only_model: Path) -> None:
    flags = ["--load-format", "null", "--http", f"127.0.0.1:{free_port()}", "--api-key", KEY]
    with Daemon(str(ids_only_model), *flags, "--allowed-origins", "https://a.b") as daemon:
        wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-mine"}
        ahead = httpx.options(f"{daemon.http}/v1/completions", headers={"origin": "https://a.b", **wanted})
        assert ahead.status_code == 204
        assert ahead.headers["access-control-allow-origin"] == "https://a.b"
        assert ahead.headers["access-control-allow-methods"] == "POST"
        assert ahead.headers["access-control-allow-headers"] == "authorization,x-mine"
        other = httpx.options(f"{daemon.http}/v1/completions", headers={"origin": "https://a.c", **wanted})
        assert not any(name.startswith("access-control") for name in other.headers)
        assert other.headers["vary"] == "Origin"
        # Who asks otherwise is no browser ahead of a request: it needs a key like all others.
        assert httpx.options(f"{daemon.http}/v1/models", headers={"origin": "https://a.b"}).status_code == 401
        told = httpx.get(f"{daemon.http}/v1/models", headers={"authorization": f"Bearer {KEY}"})
        assert told.status_code == 200
        assert "access-control-allow-origin" not in told.headers


@pytest.mark.parametrize(
    "origin", ["", "a.b", "https://", "https://a.b/", "https://a.b/x", "ftp://a.b", "https://*.b", "https://a b"]
)
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(ValueError, match=r"^--allowed-origins got .*; want such as https://chat.example.com, or \*"):
        EngineConfig(model="tiny", http="127.0.0.1:80", allowed_origins=(origin,))


def test_origins_with_no_door() -> None:
    with pytest.raises(ValueError, match="--allowed-origins is about the HTTP door, and there is none"):
        EngineConfig(model="tiny", allowed_origins=("*",))
