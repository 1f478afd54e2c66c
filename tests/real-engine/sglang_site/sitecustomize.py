"""Python imports this when a process of an SGLang engine starts: its folder is in PYTHONPATH.

SGLang's wheel is for CUDA. On a machine without it, most of SGLang runs as it is. What does not is replaced
here: packages that are imported and not used for the tiny model, memory that would be pinned for a GPU, and
sockets that would listen on all interfaces.
"""

import importlib.machinery
import sys
import types

# Kernels of CUDA and of processors with AMX, and a shell.
ABSENT = ("sgl_kernel", "IPython")


class _Missing:
    """A name of an absent package. It can be passed on, and has further names, but cannot be called."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        return _missing(f"{self._name}.{name}", name)

    def __call__(self, *_, **__):
        raise NotImplementedError(f"{self._name} is not on this machine")


def _missing(whole, name):
    if name.startswith("__"):
        raise AttributeError(whole)
    return _Missing(whole)


class _AbsentModule(types.ModuleType):
    __path__ = ()
    __version__ = "0"

    def __getattr__(self, name):
        return _missing(f"{self.__name__}.{name}", name)


class _AbsentLoader:
    @staticmethod
    def create_module(spec):
        return _AbsentModule(spec.name)

    @staticmethod
    def exec_module(_module):
        pass


def _pin_no_pool(module):
    # A decode engine would pin the host memory of its pool.
    module._cuda_host_register = lambda *_, **__: None


def _pin_no_indices(module):
    # A prefill engine would send the numbers of pages from pinned memory, after an event of CUDA.
    module.MooncakeKVSender.supports_host_tensor_indices = False


def _listen_on_loopback(module):
    bind = module.Socket.bind

    def narrowed(socket, address):
        return bind(socket, address.replace("//*:", "//127.0.0.1:").replace("//0.0.0.0:", "//127.0.0.1:"))

    module.Socket.bind = narrowed


CHANGES = {
    "sglang.srt.mem_cache.pool_host.common": _pin_no_pool,
    "sglang.srt.disaggregation.mooncake.conn": _pin_no_indices,
    "zmq.sugar.socket": _listen_on_loopback,
}


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, _AbsentLoader, is_package=True)
        if name not in CHANGES:
            return None
        # Not through `sys.meta_path`, where this finder would be asked again.
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        load, change = spec.loader.exec_module, CHANGES[name]

        def load_and_change(module):
            load(module)
            change(module)

        spec.loader.exec_module = load_and_change
        return spec


sys.meta_path.insert(0, _Finder)
