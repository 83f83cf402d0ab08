"""Whether a server answers at all, asked before a library that would try it for a minute, in silence."""

import socket
import threading
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from tputrain.errors import in_words

PATIENCE = 5.0
"""Seconds in which a server has to answer."""
_PORTS = {"http": 80, "https": 443}


def why_unreachable(url: str) -> str | None:
    """Why nothing answers at `url`, or at the proxy that leads there, in words; None: something does."""
    asked = urlsplit(url)
    proxies = getproxies()
    proxy = proxies.get(asked.scheme) or proxies.get("all")
    if proxy is not None and not proxy_bypass(asked.hostname or ""):
        asked = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    address = (asked.hostname or "", asked.port or _PORTS.get(asked.scheme, 80))
    reasons: list[str] = []
    # A thread, because looking up a name has no timeout of its own.
    asking = threading.Thread(target=_connect, args=(address, reasons), daemon=True)
    asking.start()
    asking.join(PATIENCE)
    if asking.is_alive():
        return f"no answer within {PATIENCE:.0f} s"
    return reasons[0] if reasons else None


def _connect(address: tuple[str, int], reasons: list[str]) -> None:
    try:
        socket.create_connection(address, timeout=PATIENCE).close()
    except (OSError, UnicodeError) as error:  # a name that cannot be one of a host
        reasons.append(in_words(error))
