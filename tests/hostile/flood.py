"""A hostile client at full speed, as a program: `python -m tests.hostile.flood ADDRESS`.

Sends rejected requests of 16 MB, small requests without a pause, and valid batches, all at once,
from its line "begun" until its input ends. Then it prints the number of its answers, and the median
time of a valid batch in milliseconds.
"""

import asyncio
import statistics
import sys
import time
from collections import Counter
from typing import Any, Final

import grpc

from timerclient.proto import timer_pb2 as pb

MIB: Final = 1 << 20
ROWS: Final = 1_000


async def main(address: str) -> None:
    options = [("grpc.max_send_message_length", 64 * MIB)]
    asked, took_s = Counter[str](), [0.0]
    large = bytes([3 << 3 | 2, 0]) * (8 * MIB)
    timers = pb.TimerColumns(
        topic="flood", payload_sizes=[100] * ROWS, payloads=bytes(100 * ROWS), delay_ms=[3_600_000]
    )
    batch = pb.ScheduleRequest(timers=[timers]).SerializeToString()
    small = pb.CreateTopicRequest(topic="?").SerializeToString()
    kinds = {
        "large": ("TimerService/Schedule", large, 4),
        "small": ("AdminService/CreateTopic", small, 100),
        "batch": ("TimerService/Schedule", batch, 8),
    }
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))

    async def flood(channel: grpc.aio.Channel, kind: str, method: str, data: bytes) -> None:
        call: Any = channel.unary_unary(f"/timer.v1.{method}")
        while not ended.done():
            began_s = time.monotonic()
            try:
                await call(data, timeout=10)
            except grpc.aio.AioRpcError as error:
                asked[f"{kind} {error.code().name}"] += 1
            else:
                took_s.append(time.monotonic() - began_s)
                asked[f"{kind} OK"] += 1
                if len(took_s) == 2:
                    print("begun", flush=True)

    async with grpc.aio.insecure_channel(address, options=options) as channel:
        await asyncio.gather(
            *(
                flood(channel, kind, method, data)
                for kind, (method, data, tasks) in kinds.items()
                for _ in range(tasks)
            )
        )
    print(dict(asked))
    print(statistics.median(took_s) * 1_000)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
