"""Pages of which origins may read what the HTTP door says (CORS): none, unless `--allowed-origins` names them.

A browser asks ahead of a request that carries JSON or a key; it is answered here, by no route and without a key.
"""

from collections.abc import Mapping, Sequence

from starlette.responses import Response

_ANY = "*"
_DAY_SECONDS = b"86400"
_TOLD = b"x-request-id, request-id, retry-after"
"""Headers of answers that a page may read."""


class Origins:
    """Those that are allowed."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._any = _ANY in allowed
        self._allowed = {origin.encode() for origin in allowed}

    def headers(self, asked: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """What an answer to a request with these headers says of it."""
        if not self._allowed:
            return []
        origin = b"*" if self._any else asked.get(b"origin", b"")
        varies = [] if self._any else [(b"vary", b"Origin")]  # or a cache gives one origin what another was told
        if origin not in self._allowed:
            return varies
        return [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", _TOLD), *varies]

    def answer_ahead(self, method: str, asked: Mapping[bytes, bytes]) -> Response | None:
        """To a browser that asks whether it may send a request of a page's; None: it asks something else."""
        wanted = asked.get(b"access-control-request-method")
        if not self._allowed or method != "OPTIONS" or wanted is None or b"origin" not in asked:
            return None
        response = Response(status_code=204)
        if self._any or asked[b"origin"] in self._allowed:
            response.raw_headers += [
                (b"access-control-allow-methods", wanted),
                (b"access-control-allow-headers", asked.get(b"access-control-request-headers", b"")),
                (b"access-control-max-age", _DAY_SECONDS),
            ]
        return response
