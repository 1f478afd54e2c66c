"""Python imports this when a process of a Mooncake engine starts: its folder is in PYTHONPATH.

vLLM's MooncakeConnector asks PyTorch for the index of the current accelerator, which is an error on a
machine without one. Here the answer is 0. Over TCP, Mooncake makes no use of it.
"""

import importlib.machinery
import sys

MODULE = "torch.accelerator"


class _Loader:
    """Loads the module as its own loader does, and then answers for the missing device."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        module.current_device_index = lambda: 0


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != MODULE:
            return None
        # Not through `sys.meta_path`, where this finder would be asked again.
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder)
