"""The contestants. A peer's module is imported only when it takes part."""

import importlib
from typing import Final

from bench.peers.peer import Peer

OURS: Final = "ours"
ROSTER: Final[dict[str, str]] = {
    OURS: "ours:Ours",
    "redis": "redis_peer:Redis",
    "redis-waitaof": "redis_peer:RedisReplicated",
    "nats": "nats_peer:Nats",
    "nats-synced": "nats_peer:NatsSynced",
    "rabbitmq": "rabbitmq_peer:RabbitMq",
    "beanstalkd": "beanstalkd_peer:Beanstalkd",
    "rocketmq": "rocketmq_peer:RocketMq",
    "celery": "celery_peer:Celery",
}
"""Name -> module and class, in the order of the tables."""


def peer_class(name: str) -> type[Peer]:
    """Return the class of a contestant."""
    module, _, name_in_module = ROSTER[name].partition(":")
    found: type[Peer] = getattr(importlib.import_module(f"bench.peers.{module}"), name_in_module)
    return found
