"""A Flower grid in this process: real ClientApps and contexts, and every message as Flower's bytes in between.

What it leaves out is the SuperLink, the SuperNodes and their processes; tests/protofleet/flower/test_processes.py has
them. Replies come back last first, and a client's context goes through its bytes after each message, as between
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import context_from_proto, context_to_proto, message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Context as ContextProto
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.serverapp import Grid

try:  # who a message is from is, since 1.40 or so, a property of the process that makes it
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
except ImportError:
    pass


class LocalGrid(Grid):
    """Nodes of these apps, by node id; each is told the number of its partition.

    Attributes:
        seen: every message that went up, by round of asking.
    """

    def __init__(self, apps: Mapping[int, ClientApp], *, named: bool = True) -> None:
        self._apps = dict(apps)
        self.seen: list[list[Message]] = []
        self.down: list[list[Message]] = []
        self.contexts = {
            node: Context(1, node, {"partition-id": number} if named else {}, RecordDict(), {})
            for number, node in enumerate(self._apps)
        }

    def get_node_ids(self) -> Iterable[int]:
        return list(self._apps)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies = []
        self.down.append([])
        for message in messages:
            node = message.metadata.dst_node_id
            arrived = _travelled(message)
            self.down[-1].append(arrived)
            reply = self._apps[node](arrived, self.contexts[node])
            reply.metadata.__dict__["_src_node_id"] = node
            replies.append(_travelled(reply))
            proto = context_to_proto(self.contexts[node]).SerializeToString()
            self.contexts[node] = context_from_proto(ContextProto.FromString(proto))
        self.seen.append(replies)
        return replies[::-1]

    def _unused(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    run = property(_unused)
    set_run = create_message = push_messages = pull_messages = _unused


def grid_of(mods: Iterable[Any], train: Callable[[Message, Context], Message]) -> LocalGrid:
    """A node for each mod, whose app has it and this train function; node ids fall, as partitions' numbers rise."""
    apps = {}
    for number, mod in enumerate(mods):
        apps[900 - number] = app = ClientApp(mods=[mod])
        app.train()(train)
    return LocalGrid(apps)


def _travelled(message: Message) -> Message:
    return message_from_proto(MessageProto.FromString(message_to_proto(message).SerializeToString()))
