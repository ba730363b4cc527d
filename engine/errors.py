"""The exception tree of the engine's own side. What a client sees is in `ipc/client.py`."""


class TercetError(Exception):
    """Anything the engine raises on purpose, except plain `ValueError` for a wrong argument."""


class StartupFailed(TercetError):
    """The engine did not become ready; the message holds the last words of the process that failed."""


class AddressTaken(StartupFailed):
    """Another process listens where this engine is to listen."""


class ModelNotFound(TercetError):
    """The named model is neither a folder, nor a GGUF file, nor `demo`, nor a hub id that can be fetched."""


class UnsupportedModel(TercetError):
    """The checkpoint asks for something the engine would get wrong; the message names it."""
