"""`import torch` without what tracers, exporters and trainers need, where processes start often: half of its time.

What stands in for such a module becomes it when something of it is asked for, or a module inside it. Of the one that
tells how tensors without data are computed nobody asks: what it would tell is missing, and PyTorch says so.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_UNASKED = "torch._meta_registrations"
_LATER = {
    _UNASKED,
    "torch.distributions",
    "torch.export",
    "torch.hub",
    "torch.masked",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
    "torch.optim",
    "torch.profiler",
    "torch.quantization",
    "torch.utils.data",
}


def import_lean() -> None:
    """When this process imports torch. Without `importlib.abc`, which takes a while itself."""
    sys.meta_path.insert(0, _Finder())


class _Finder:
    def find_spec(self, name, path, target=None):
        if name not in _LATER:
            first = sys.modules.get(name.rpartition(".")[0])
            if type(first) is not _Late:
                return None
            first._become()  # or what is in it runs before it
            return ModuleSpec(name, _Nothing(sys.modules[name])) if name in sys.modules else None
        spec = PathFinder.find_spec(name, path)
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


class _Nothing:
    """Left to be done for a module that has come with another."""

    def __init__(self, module):
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec):
        return self.module

    def exec_module(self, module):
        module.__spec__ = self.spec


class _Late(ModuleType):
    def __getattr__(self, name):
        """It has no attributes yet but those of every module."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._become(), name)

    def _become(self):
        if type(self) is _Late:
            self.__class__ = ModuleType
            self.__spec__.loader.loader.exec_module(self)
        return self
