"""Proxy on the way to an address elsewhere, as the environment names it (`HTTPS_PROXY`, `NO_PROXY`).

aiohttp reads these variables only together with `~/.netrc`, whose entry for a host it refuses beside
a key in a header.
"""

from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

_HERE = ("127.0.0.1", "localhost", "::1")


def proxy_for(url: str) -> str | None:
    """URL of the HTTP proxy for a URL; None: there is none, or the address is one of this machine."""
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    if parts.hostname in _HERE or proxy_bypass(place):
        return None
    given = getproxies()
    found = given.get(parts.scheme) or given.get("all", "")
    proxy = found if "://" in found or not found else f"http://{found}"
    return proxy if proxy.startswith(("http://", "https://")) else None
