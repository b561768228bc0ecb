"""torch's containers of modules as a type checker should see them; at run time they are torch's own.

To a type checker an entry of an `nn.ModuleDict` is an `nn.Module`, whose attributes may all be tensors, so that no
method of it could be called. What an entry of `Nets` is depends on its name, and only the algorithm knows; a `Modules`
knows it from what it is made of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    M = TypeVar("M", bound=nn.Module)

    class Nets(nn.ModuleDict):
        def __getitem__(self, key: str) -> Any: ...

    class Modules(nn.ModuleList, Generic[M]):
        def __init__(self, modules: Iterable[M] = ()): ...

        def __iter__(self) -> Iterator[M]: ...

else:
    Nets, Modules = nn.ModuleDict, nn.ModuleList
