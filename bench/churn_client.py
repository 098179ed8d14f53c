"""A client that schedules and cancels without a pause.

`python -m bench.churn_client ADDRESS SECONDS` prints the number of timers that it cancelled.
"""

import asyncio
import sys
import time
from typing import Any, Final

import grpc

from timerclient.proto import timer_pb2 as pb

ROWS: Final = 1_000
PAYLOAD_SIZE: Final = 100
TASKS: Final = 16
"""Requests in flight."""
DELAY_MS: Final = range(3_600_000, 24 * 3_600_000, 600_000)
"""From one hour to a day."""


async def main(address: str, seconds: float) -> None:
    """Schedule batches of ROWS and cancel each at once, for `seconds`."""
    end_s, cancelled = time.monotonic() + seconds, 0

    async def churn(channel: grpc.aio.Channel, number: int) -> None:
        nonlocal cancelled
        schedule: Any = channel.unary_unary("/timer.v1.TimerService/Schedule")
        cancel: Any = channel.unary_unary("/timer.v1.TimerService/Cancel")
        request = _request(number).SerializeToString()
        while time.monotonic() < end_s:
            try:
                ids = pb.ScheduleResponse.FromString(await schedule(request, timeout=10)).timer_ids
                await cancel(pb.CancelRequest(timer_ids=ids).SerializeToString(), timeout=10)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    raise
                continue
            cancelled += ROWS

    async with grpc.aio.insecure_channel(address) as channel:
        await asyncio.gather(*(churn(channel, number) for number in range(TASKS)))
    print(cancelled)


def _request(number: int) -> pb.ScheduleRequest:
    delays = [DELAY_MS[(number + row) % len(DELAY_MS)] for row in range(ROWS)]
    columns = pb.TimerColumns(
        topic="churn",
        payload_sizes=[PAYLOAD_SIZE] * ROWS,
        payloads=bytes(PAYLOAD_SIZE * ROWS),
        delay_ms=delays,
    )
    return pb.ScheduleRequest(timers=[columns])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
