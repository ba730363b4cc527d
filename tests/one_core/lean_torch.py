"""`import torch` without what only its tracers and exporters need, two fifths of its time, where processes start often.

What stands in for such a module becomes it when something of it is asked for. Of the one that tells how tensors
without data are computed nobody asks: what it would tell is missing, and PyTorch says so.
"""

import sys
from importlib.machinery import PathFinder
from types import ModuleType

_UNASKED = "torch._meta_registrations"
_LATER = (_UNASKED, "torch.export")


def import_lean() -> None:
    """When this process imports torch. Without `importlib.abc`, which takes a while itself."""
    sys.meta_path.insert(0, _Finder())


class _Finder:
    def find_spec(self, name, path, target=None):
        spec = PathFinder.find_spec(name, path) if name in _LATER else None
        if spec is not None:
            spec.loader = _LateLoader(spec.loader)
        return spec


class _LateLoader:
    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        return _Late(spec.name)

    def exec_module(self, module):
        import torch

        if module.__name__ == _UNASKED and hasattr(torch._C, "_set_generator_metaclass"):
            from torch._opaque_base import OpaqueBaseMeta

            torch._C._set_generator_metaclass(OpaqueBaseMeta)  # or no generator can be made


class _Late(ModuleType):
    def __getattr__(self, name):
        """It has no attributes yet but those of every module."""
        if name.startswith("__"):
            raise AttributeError(name)
        self.__class__ = ModuleType
        self.__spec__.loader.loader.exec_module(self)
        return getattr(self, name)
