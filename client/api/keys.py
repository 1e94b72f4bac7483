"""API keys: read once, compared in constant time."""

import hmac
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from furcate.builder.errors import ConfigError

MAX_KEY_FILE_BYTES = 1 << 20


def keys_from(given: Iterable[str], file: Path | None) -> tuple[str, ...]:
    """The keys given and those of a file, one a line (blank lines and # comments left out); ConfigError when one cannot be."""
    keys = [*given, *([] if file is None else _keys_in(file))]
    for key in keys:
        if not (key.isascii() and key.isprintable() and key.strip()) or " " in key:
            raise ConfigError("An API key is empty, or has a space or a character that is not ASCII; choose another.")
    return tuple(keys)


class KeyRing:
    """Knows which keys are right."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(sha256(key.encode()).digest() for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def has(self, key: bytes) -> bool:
        """True for a right key. Every key is compared to its end, so the time tells nothing of them."""
        digest = sha256(key).digest()
        return sum(hmac.compare_digest(digest, each) for each in self._digests) > 0


def _keys_in(file: Path) -> list[str]:
    try:
        with file.open(encoding="ascii") as lines:
            text = lines.read(MAX_KEY_FILE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file '{file}' cannot be read ({type(error).__name__}).") from None
    keys = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file '{file}' holds no key; write one a line.")
    return keys
