"""What forward code does while it is traced that a graph does not hold.

A traced forward computes with stand-ins for tensors. They answer what a graph can answer later, and
of everything else that code asks of them, or does beside, somebody has to be told: the stand-in has
no value, so the answer would be one of tracing and not of the model.
"""

from __future__ import annotations

import builtins
import dis
import functools
import operator
import sys
import sysconfig
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.proxy import Attribute
from torch.jit._trace import is_tracing

from ._rewritten import unpack
from ._steps import is_shape

__all__ = ["TracedTensor", "Watch", "written_by_user"]

Refuse = Callable[[str], None]

# PyTorch, with what it calls itself, and this package.
_LIBRARIES = frozenset(
    ("convnormpool", "mpmath", "networkx", "numpy", "sympy", "torch", "triton", "typing_extensions")
)
# Modules of Python that ask on behalf of who calls them.
_ON_BEHALF = frozenset(("abc", "functools", "typing"))
_STDLIB = sysconfig.get_path("stdlib")
_SITES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
_IN_PLACE = (
    "iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift",
    "isub", "itruediv", "ixor",
)  # fmt: skip
# Functions whose answer is about the kind of object that a name stands for.
_OF_OBJECTS = (callable, dir, globals, id, issubclass, locals, type, vars)
_OF_OBJECTS_BY_NAME = frozenset(
    ("__class__", "__dict__", "has_torch_function", "is_", "is_not", "is_tensor_like",
     "singledispatch", "suppress", "tree_map_only", "typename")
)  # fmt: skip
# Attributes that may be None, which a stand-in is not.
_PERHAPS_NONE = frozenset(("_base", "grad", "grad_fn", "name"))
# What depends on settings of the process that a call does not look at again.
_OF_SETTINGS: tuple[Any, ...] = (
    torch.are_deterministic_algorithms_enabled,
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch.get_autocast_cpu_dtype,
    torch.get_autocast_dtype,
    torch.get_autocast_gpu_dtype,
    torch.get_default_device,
    torch.get_default_dtype,
    torch.get_num_threads,
    torch.is_anomaly_enabled,
    torch.is_inference_mode_enabled,
    is_tracing,
    torch._C._is_tracing,
)
_SETTINGS = frozenset(f.__name__ for f in _OF_SETTINGS)
_SETTINGS_CODE = {f.__code__: f.__name__ for f in _OF_SETTINGS if hasattr(f, "__code__")}
_NAMES = frozenset(("LOAD_ATTR", "LOAD_GLOBAL", "LOAD_METHOD", "LOAD_NAME"))
_CATCHES = frozenset(("CHECK_EG_MATCH", "CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH"))


def _root(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _from_python(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith("<frozen") or (file.startswith(_STDLIB) and not file.startswith(_SITES))


def _from_model(frame: FrameType) -> bool:
    """Whether a frame runs code of a model and not of PyTorch, of this package, of Python."""
    return _root(frame) not in _LIBRARIES and not _from_python(frame)


def written_by_user(frame: FrameType | None) -> bool:
    """Whether code of a model asks, if need be through a function of Python."""
    while frame is not None and _root(frame) in _ON_BEHALF and _from_python(frame):
        frame = frame.f_back
    return frame is not None and _root(frame) not in _LIBRARIES


def _at_import(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


class Watch:
    """While it is entered, every function that runs in this thread is noted."""

    def __init__(self, refuse: Refuse) -> None:
        self._refuse = refuse
        # By code, the names that it can see.
        self._ran: dict[CodeType, dict[str, Any]] = {}
        self.asks_kind = False  # the code of a model is in a call of isinstance or the like
        self.perhaps_none = False  # a module was called that may return no tensor

    def __enter__(self) -> Watch:
        self._before = cast("Any", sys.getprofile())
        if hasattr(self._before, "disable"):  # cProfile's, which is no function
            self._before.disable()
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        if hasattr(self._before, "enable"):
            self._before.enable()
        else:
            sys.setprofile(self._before)

    def _event(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code is torch.is_tensor.__code__ and _stands_in(frame.f_locals.get("obj")):
                self._refuse("its forward asks for the type of a tensor")
            elif code in _SETTINGS_CODE and frame.f_back and _from_model(frame.f_back):
                self._refuse(f"its forward calls torch.{_SETTINGS_CODE[code]}()")
            elif code not in self._ran and _from_model(frame) and not _at_import(frame):
                self._ran[code] = frame.f_globals
            return
        owner = getattr(function, "__self__", None) if event == "c_call" else None
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
            # Called with a stand-in it would just run its forward.
            self._refuse(f"its forward applies {owner.__name__}, a torch.autograd.Function")
        if event != "return" and _from_model(frame):
            asks = any(function is f for f in (isinstance, getattr, hasattr))
            self.asks_kind = asks and event == "c_call"
            if event == "c_call" and getattr(function, "__name__", "") in _SETTINGS:
                self._refuse(f"its forward calls torch.{function.__name__}()")

    def look(self) -> None:
        """Refuses what the functions that ran say about objects instead of values."""
        for code, names in self._ran.items():
            reason = _problem(code, names, self.perhaps_none)
            if reason:
                self._refuse(reason)


def _problem(code: CodeType, names: dict[str, Any], perhaps_none: bool) -> str:
    """Why a function may have taken another course with tensors than with stand-ins, or ""."""
    instructions = list(dis.get_instructions(code))
    stores = [i.argval for i in instructions if i.opname.startswith("STORE_FAST")]
    stored = {n for found in stores for n in (found if isinstance(found, tuple) else (found,))}
    before: dis.Instruction | None = None
    tested: dis.Instruction | None = None  # what stands in front of a constant
    for instruction in instructions:
        name, value = instruction.opname, instruction.argval
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            found = names.get(value, getattr(builtins, str(value), None))
            if any(found is f for f in _OF_OBJECTS):
                return f"its forward calls {value}()"
            if isinstance(found, functools._lru_cache_wrapper):
                return f"its forward calls {value}(), which remembers results"
        if name in _NAMES and value in _OF_OBJECTS_BY_NAME:
            return f"its forward reads {value}"
        if name.startswith("MATCH_"):
            return "its forward matches patterns"
        if name in _CATCHES or (before and before.opname == "PUSH_EXC_INFO" and name == "POP_TOP"):
            return "its forward catches exceptions"
        constant = before is not None and before.opname == "LOAD_CONST"
        if name == "IS_OP" and not (constant and before and before.argval in (None, True, False)):
            return "its forward compares objects by identity"
        asked = tested if name == "IS_OP" else before if name.endswith("_NONE") else None
        computed = asked is not None and "FAST" in asked.opname and asked.argval in stored
        if computed and perhaps_none:
            return "its forward compares what a module returned with None"
        tested = before
        before = instruction
    return ""


def _stands_in(value: object) -> bool:
    return issubclass(type(value), fx.Proxy)


def _unpacked(frame: FrameType) -> int | None:
    """How many values the code that iterates takes, where it unpacks them."""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset == frame.f_lasti and instruction.opname == "UNPACK_SEQUENCE":
            return int(instruction.argval)
    return None


class TracedTensor(fx.Proxy):
    """Stands for a tensor, or for what an operation gave, in the code of a model."""

    tracer: Any

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        asked = sys._getframe(1)
        if self.tracer.watch.asks_kind or (_root(asked) in _ON_BEHALF and _from_python(asked)):
            self.tracer.refuse("its forward asks for the type of a tensor")
        return type(self)

    def __getattr__(self, name: str) -> Attribute:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        known = getattr(Tensor, name, None)
        if (known is None or name in _PERHAPS_NONE) and written_by_user(sys._getframe(1)):
            self.tracer.refuse(f"its forward asks a tensor for {name}, which not every tensor has")
        attribute = TracedAttribute(self, name)
        if not callable(known):
            _ = attribute.node  # as it is now, before anything changes the tensor
        return attribute

    def __setattr__(self, name: str, value: Any) -> None:
        if written_by_user(sys._getframe(1)):
            self.tracer.refuse(f"its forward sets {name} of a tensor")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        self.tracer.refuse(f"its forward deletes {name} of a tensor")

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.refuse("its forward sets elements of a tensor")

    def __len__(self) -> int:
        self.tracer.refuse("its forward can't be traced: it takes the length of a tensor")
        raise AssertionError

    def __iter__(self) -> Iterator[Any]:
        count = _unpacked(sys._getframe(1))
        if count is None:
            return iter(self.tracer.iter(self))
        values: Any = self
        if not is_shape(self.node):
            # A graph asks for the elements one by one, and would not miss the others.
            values = self.tracer.create_proxy("call_function", unpack, (self, count), {})
        return (values[i] for i in range(count))


def _change(name: str) -> Any:
    function = getattr(operator, name)

    def change(self: Any, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return change


for _name in _IN_PLACE:
    setattr(TracedTensor, f"__{_name}__", _change(_name))


class TracedAttribute(Attribute, TracedTensor):
    """An attribute of that, or a method to be called."""

    def __getattr__(self, name: str) -> Attribute:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return TracedAttribute(self, name)
