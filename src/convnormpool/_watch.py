"""What forward code does while it is traced that a graph does not hold.

A traced forward computes with stand-ins for tensors. They answer what a graph can answer later, and
of everything else that code asks of them, or does beside, somebody has to be told: the stand-in has
no value, so the answer would be one of tracing and not of the model.
"""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.proxy import Attribute

from ._rewritten import unpack
from ._steps import is_shape

__all__ = ["TracedTensor", "Watch", "written_by_user"]

Refuse = Callable[[str], None]

_LIBRARIES = frozenset(("torch", "convnormpool", "abc", "functools", "typing"))
_IN_PLACE = (
    "iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift",
    "isub", "itruediv", "ixor",
)  # fmt: skip
# Functions whose answer is about the kind of object that a name stands for.
_OF_OBJECTS = frozenset(("dir", "globals", "id", "issubclass", "locals", "type", "vars"))
_OF_CLASSES = frozenset(("__class__", "__dict__"))
# What depends on settings of the process that a call does not look at again.
_OF_SETTINGS = frozenset(
    f.__name__
    for f in (torch.get_default_dtype, torch.is_inference_mode_enabled, torch.is_anomaly_enabled)
)


def _root(frame: FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__", "")).partition(".")[0]


def written_by_user(frame: FrameType | None) -> bool:
    """Whether a frame runs code of a model and not of PyTorch, of this package, of Python."""
    while frame is not None and _root(frame) in ("abc", "functools", "typing"):
        frame = frame.f_back
    return _root(frame) not in _LIBRARIES


class Watch:
    """While it is entered, every function that runs in this thread is noted."""

    def __init__(self, refuse: Refuse) -> None:
        self._refuse = refuse
        self._codes: set[CodeType] = set()
        self.asks_kind = False  # the code of a model is in a call of isinstance

    def __enter__(self) -> Watch:
        self._before = sys.getprofile()
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _event(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code is torch.is_tensor.__code__ and _stands_in(frame.f_locals.get("obj")):
                self._refuse("its forward asks for the type of a tensor")
            elif written_by_user(frame) and _root(frame) not in sys.stdlib_module_names:
                self._codes.add(code)
            return
        owner = getattr(function, "__self__", None) if event == "c_call" else None
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
            # Called with a stand-in it would just run its forward.
            self._refuse(f"its forward applies {owner.__name__}, a torch.autograd.Function")
        if event != "return" and written_by_user(frame):
            self.asks_kind = event == "c_call" and function is isinstance
            if event == "c_call" and getattr(function, "__name__", "") in _OF_SETTINGS:
                self._refuse(f"its forward calls torch.{function.__name__}()")

    def look(self) -> None:
        """Refuses what the functions that ran say about objects instead of values."""
        for code in self._codes:
            reason = _problem(code)
            if reason:
                self._refuse(reason)


def _problem(code: CodeType) -> str:
    before: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if name in ("LOAD_GLOBAL", "LOAD_NAME") and value in _OF_OBJECTS:
            return f"its forward calls {value}()"
        if name in ("LOAD_ATTR", "LOAD_METHOD") and value in _OF_CLASSES:
            return f"its forward reads {value}"
        nothing = before is not None and "LOAD" in before.opname and before.argval is None
        if name == "IS_OP" and not nothing:
            return "its forward compares objects by identity"
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
        if self.tracer.watch.asks_kind:
            self.tracer.refuse("its forward asks for the type of a tensor")
        return type(self)

    def __getattr__(self, name: str) -> Attribute:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if not hasattr(Tensor, name) and written_by_user(sys._getframe(1)):
            self.tracer.refuse(f"its forward asks a tensor for {name}, which not every tensor has")
        return TracedAttribute(self, name)

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
