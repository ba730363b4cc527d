"""`--adapter NAME=FOLDER`: what an engine's adapters are called, and where each is. It looks at no file."""

from collections.abc import Iterable


def read_adapters(given: Iterable[str]) -> dict[str, str]:
    """Folders by name, in the order given: an adapter's place in it is its number. Raises `ValueError`."""
    adapters: dict[str, str] = {}
    for text in given:
        name, _, folder = text.partition("=")
        if not (name and folder):
            raise ValueError(f"--adapter got {text!r}; want NAME=FOLDER, as in sql=/adapters/sql")
        if name in adapters:
            raise ValueError(f"--adapter got the name {name!r} twice; want another name for {folder!r}")
        adapters[name] = folder
    return adapters
