"""What a page shows: its files, its state, and what else a browser may ask of it.

A page is one HTML file with the first state in it. Its script asks for events, and each brings the state anew, or what
has changed of it. What changes anything is a POST of JSON.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from protofleet.contract.page.visitors import Visitor

__all__ = ["Content", "Site"]


@dataclass(frozen=True)
class Content:
    """What is answered to a GET; `kind` is its media type."""

    body: bytes
    kind: str


class Site(ABC):
    """One page; its methods are called from any thread.

    Attributes:
        PACKAGE: where its `page.html` (the body), `page.js` and `page.css` lie.
        ABOUT: what a browser's tab says of it, beside its title.
        CODE_AT: where the pairing code stands, for who is asked for it.
        version: of its state; another one makes an event.
        changed: is notified with each change.
    """

    PACKAGE: ClassVar[str]
    ABOUT: ClassVar[str]
    CODE_AT: ClassVar[str]

    def __init__(self) -> None:
        self.version = 0
        self.changed = threading.Condition()

    def came(self) -> None:
        """The state is another one."""
        with self.changed:
            self.version += 1
            self.changed.notify_all()

    @property
    @abstractmethod
    def title(self) -> str:
        """What the page is about."""

    @abstractmethod
    def first(self, visitor: Visitor) -> str:
        """The state that the page comes with, as JSON.

        Raises:
            ProtofleetError: it cannot be read.
        """

    @abstractmethod
    def event(self, visitor: Visitor, known: int) -> tuple[int, str]:
        """What a browser is told that has the state of version `known`: the version that it has then, and JSON.

        Raises:
            ProtofleetError: it cannot be read.
        """

    def get(self, visitor: Visitor, path: str, query: Mapping[str, str]) -> Content | None:
        """What else there is to read; None where there is nothing."""
        return None

    def post(self, visitor: Visitor, path: str, given: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Change something; gives the answer, None where the page has no such path.

        Raises:
            ProtofleetError: it cannot be done.
            ValueError, KeyError, TypeError, AttributeError: `given` is nothing that the page's script sends.
        """
        return None
