"""The user's model seen through the compiled one: attributes, methods, structure.

Until the first call the user sees the original and may change it freely. From then on they see its modules with
the shards in them (`program.shown`): attributes can be changed, and programs follow (guards.py); structure can't
(pinned.py); methods run as described in methods.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any, TypeVar

from torch import Tensor, nn

from ..world import World
from .guards import SLOTS, AttributeGuard, Watchable, settings_of
from .methods import method_of, property_of
from .overrides import overridden
from .pinned import check_global_hooks, check_hooks
from .stale_attributes import refuse_reads
from .wrappers import Unwrappable


class ModelView(Unwrappable):
    """Attributes that this class lacks are those of the user's model."""

    _around: dict[str, Any]
    _flags: tuple[bool, ...]
    _parts: list[nn.Module]  # as the user sees them, in the order of the skeleton's
    _world: World
    _guard: AttributeGuard | None = None  # of the programs' constants, once there are any

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            root = self.root
            if name == "module" and root is not None and not hasattr(root, name):
                return self  # scripts written for DDP unwrap it, to save or to call a method
            if root is None or (name.startswith("_") and name not in vars(root)):
                raise
            if isinstance(getattr(type(root), name, None), property) and self._guard is not None:
                return property_of(self, name)
            value = getattr(root, name)
            if isinstance(value, nn.Module) or (isinstance(value, Tensor) and name not in vars(root)):
                raise
            is_method = isinstance(value, MethodType) and value.__self__ is root
            return method_of(self, name, value) if is_method else value

    def __setattr__(self, name: str, value: Any) -> None:
        root = self.root
        is_part = isinstance(value, nn.Parameter | nn.Module) or any(name in vars(self).get(slot, ()) for slot in SLOTS)
        if root is None or is_part or name in vars(self) or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(root, name, value)

    def __delattr__(self, name: str) -> None:
        if self.root is not None and name in vars(self.root) and name not in vars(self):
            delattr(self.root, name)
        else:
            super().__delattr__(name)

    @property
    def root(self) -> nn.Module | None:
        """The user's model itself: the original until the first call, from then on one that holds the shards."""
        root: nn.Module | None = vars(self).get("_around", {}).get("root")
        return root

    @property
    def _user(self) -> nn.Module:
        """The module of the user's class that stands behind this one."""
        user: nn.Module = self._around["skeleton"] if self.root is None else self.root
        return user

    def train(self: View, mode: bool = True) -> View:
        return self._switch(lambda module: module.train(mode))

    def eval(self: View) -> View:
        return self._switch(lambda module: module.eval())

    def _switch(self: View, switch: Callable[[nn.Module], Any]) -> View:
        """Have the user's class switch modes: it may keep parts in theirs, or set attributes."""
        switch(self._user)
        self.training = self._user.training
        if self.root is None:
            self._flags = tuple(part.training for part in self._user.modules())
        return self

    def _see_flags(self) -> None:
        """A part may have been put to train or eval on its own since the last call."""
        flags = tuple(part.training for part in self._parts) or self._flags
        if flags != self._flags:
            for module, flag in zip(self._around["skeleton"].modules(), flags, strict=True):
                module.training = flag
            self._flags = flags

    def guard(self) -> None:
        """Guard the constants of programs from now on."""
        root: nn.Module = self._around["root"]
        modules = {**dict(root.named_modules()), "": self._around.get("user", root)}
        self._guard = AttributeGuard(modules, partial(self._around["compiler"].carry, self._around["skeleton"], root))
        self._guard.watch((), settings_of(self._world.device.type))

    def watch(
        self, reads: Iterable[tuple[str, str]], variables: Iterable[Watchable] = (), left: Iterable[str] = ()
    ) -> None:
        """A program with these constants was compiled; `left`: attributes that the call would set."""
        refuse_reads(self._around["root"], left)
        if self._guard is not None:
            self._guard.watch(reads, variables)

    def forget(self, name: str) -> None:
        """An attribute of the model is not a constant, even if a trace has read it."""
        if self._guard is not None:
            self._guard.forget("", name)

    def catch_up(self) -> None:
        """Called before a program is compiled: it may read new attributes."""
        if self._guard is not None:
            self._guard.catch_up()

    def constants(self, method: str = "") -> tuple[Any, ...]:
        """The key of a program besides its arguments."""
        check_global_hooks(self._around.get("harmless", ()))
        if self._guard is None:
            self._renew()
        else:
            check_hooks(self._around["root"], self._around.get("harmless", ()))
        self._see_flags()
        return method, self._flags, self._guard.state() if self._guard is not None else ()

    def stand_for(self, module: nn.Module, harmless: str) -> None:
        """Show the attributes of another module instead, for which this one runs; ignore hooks of a package."""
        self._around.update(user=module, harmless=(harmless,))

    def _renew(self) -> None:
        """Follow the original, which may have been changed since the last look."""
        compiler, known = self._around["compiler"], self._around["skeleton"]
        skeleton = compiler.renew(known)
        if skeleton is not known:
            self._around["skeleton"] = skeleton
            self.show(compiler.original)
            self._flags = ()  # they are read next

    def show(self, module: nn.Module) -> None:
        raise NotImplementedError

    def run_method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a method of the model as a program."""
        raise NotImplementedError


View = TypeVar("View", bound=ModelView)
_SPECIAL = ("__len__", "__getitem__", "__iter__", "__contains__", "__setitem__", "__delitem__")


def view_class(view: type[View], original: type[nn.Module]) -> type[View]:
    """A view class that has what Python looks up in the class: `__len__` of an nn.Sequential, methods of nn.Module
    that the user's class overrides, the signature of `forward`, by which others decide what to pass.
    """
    special = {name: _forwarded(name) for name in _SPECIAL if hasattr(original, name)}
    methods = {name: _forwarded(name) for name in overridden(view, original)}
    methods["forward"] = _signed(view.forward, original.forward)
    always = {"__bool__": lambda self: True} if special else {}
    return type(view.__name__, (view,), {**special, **methods, **always, "__module__": view.__module__})


def _signed(forward: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: ModelView, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    call.__name__, call.__doc__ = "forward", original.__doc__
    call.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return call


def _forwarded(name: str) -> Callable[..., Any]:
    def call(self: ModelView, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.root, name)(*args, **kwargs)
        return self if result is self.root else result

    return call
