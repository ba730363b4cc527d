"""The web page at `/`: plain files, served as they are, to everybody: a page with no key in it gives nothing away."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent / "web"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

PAGE_PATHS = ("/", "/page.css", "/page.js")


def page_routes() -> list[Route]:
    """One for each file; they are read now, once."""
    return [_route(path) for path in PAGE_PATHS]


def _route(path: str) -> Route:
    file = _FOLDER / (path.removeprefix("/") or "index.html")
    content, kind = file.read_bytes(), _KINDS[file.suffix]

    async def serve(_: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=kind)

    return Route(path, serve)
