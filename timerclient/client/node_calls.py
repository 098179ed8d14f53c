"""The client's calls about one node: log levels, drains, stacks, files and backups."""

from timerclient.client.group_calls import GroupCalls
from timerclient.proto import timer_pb2 as pb
from timerclient.rows import rows
from timerclient.values.errors import (
    AlreadyExists,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    TokenRejected,
)

FINAL = (InvalidRequest, NotFound, PermissionDenied, TokenRejected)
"""Errors that every node would answer."""


class OneNodeCalls(GroupCalls):
    """Calls about one node, for an event loop. Any node passes them on; no leader is needed."""

    async def set_log_level(self, level: str, *, node: str = "", logger: str = "") -> str:
        """Set the level of a logger of one node, until it restarts; return the level before.

        Args:
            level: "debug", "info", "warning" or "error"; of a named logger also "default": it
                follows its package again.
            node: Its name. Empty: the first node that answers.
            logger: Such as "cluster.control". Empty: all loggers without a level of their own.

        Raises:
            InvalidRequest: There is no such level.
            NotFound: There is no such node or logger.
        """
        request = pb.SetLogLevelRequest(
            node=rows.text("node", node),
            logger=rows.text("logger", logger),
            level=rows.text("level", level),
        )
        answer = await self._anywhere(lambda at: at.admin.SetLogLevel, request, final=FINAL)
        return answer.before

    async def drain_node(
        self, node: str, *, undo: bool = False, by: str = ""
    ) -> pb.DrainNodeResponse:
        """Drain one node: it gives the leadership away, and gets none while another node can lead.

        A restart or `undo` ends that. Returns when another node leads. `by`: holder of the drain.

        Raises:
            NotFound, AlreadyExists: There is no such node; or another holder has drained it.
            InvalidRequest, Unavailable: No other node can lead now; the node is not drained.
        """
        request = pb.DrainNodeRequest(node=rows.text("node", node), undo=undo, holder=by)
        return await self._anywhere(
            lambda at: at.admin.DrainNode, request, final=(*FINAL, AlreadyExists)
        )

    async def dump_stacks(self, node: str = "") -> pb.DumpStacksResponse:
        """Return the stacks of all threads and tasks of a node; "": of the first that answers.

        Raises:
            NotFound: There is no such node.
        """
        request = pb.DumpStacksRequest(node=rows.text("node", node))
        return await self._anywhere(lambda at: at.admin.DumpStacks, request, final=FINAL)

    async def trace_hops(self, node: str, *, begin: bool = False) -> pb.TraceHopsResponse:
        """Begin the record of one node's hops, or end it and return its stamps.

        A record ends by itself after 10 seconds, or with 4,096 stamps.

        Raises:
            NotFound: There is no such node.
        """
        request = pb.TraceHopsRequest(node=rows.text("node", node), begin=begin)
        return await self._anywhere(lambda at: at.admin.TraceHops, request, final=FINAL)

    async def reload_files(self, node: str = "") -> pb.ReloadFilesResponse:
        """Let a node look at its files of TLS at once; return the result for each file.

        `node`: its name; empty: the first that answers. No files: the node has no TLS.

        Raises:
            NotFound: There is no such node.
        """
        request = pb.ReloadFilesRequest(node=rows.text("node", node))
        return await self._anywhere(lambda at: at.admin.ReloadFiles, request, final=FINAL)

    async def begin_verification(self, node: str = "") -> pb.BeginVerificationResponse:
        """Let a node read all its files now; "": all nodes. A pass that runs is joined."""
        request = pb.BeginVerificationRequest(node=rows.text("node", node))
        return await self._anywhere(lambda at: at.admin.BeginVerification, request, final=FINAL)

    async def verification(self, node: str = "") -> pb.GetVerificationResponse:
        """Return a node's last pass over its files; "": all nodes', and if their states agree."""
        request = pb.GetVerificationRequest(node=rows.text("node", node))
        return await self._anywhere(lambda at: at.admin.GetVerification, request, final=FINAL)

    async def open_backup(
        self, node: str, backup_id: int, *, min_index: int = 0
    ) -> pb.OpenBackupResponse:
        """Pin the state of one node for a backup; return its index and its parts.

        `backup_id`: random, not 0. `min_index`: in the state. After a minute unread it is closed.

        Raises:
            NotFound, InvalidRequest: There is no such node; the id is 0.
            Unavailable: Not in time; the call may be repeated.
        """
        request = pb.OpenBackupRequest(
            node=rows.text("node", node), backup_id=backup_id, min_index=min_index
        )
        return await self._anywhere(lambda at: at.admin.OpenBackup, request, final=FINAL)

    async def fetch_backup(self, node: str, backup_id: int, path: str, offset: int) -> bytes:
        """Return at most a mebibyte of a part of an open backup from a byte on; none after its end.

        Raises:
            NotFound: The backup is not open any more, or has no such part.
            Unavailable: Not in time; the call may be repeated.
        """
        request = pb.FetchBackupRequest(
            node=rows.text("node", node), backup_id=backup_id, path=path, offset=offset
        )
        answer = await self._anywhere(lambda at: at.admin.FetchBackup, request, final=FINAL)
        return answer.data

    async def fetch_log(
        self, node: str, after: int, *, stored: int = 0, shipper_id: int = 0
    ) -> pb.FetchLogResponse:
        """Return a node's log entries after an index. `stored`: the store has them up to here.

        Raises:
            NotFound, Unavailable: There is no such node; it did not answer in time.
        """
        request = pb.FetchLogRequest(
            node=rows.text("node", node),
            after_index=after,
            stored_index=stored,
            shipper_id=shipper_id,
        )
        return await self._anywhere(lambda at: at.admin.FetchLog, request, final=FINAL)

    async def close_backup(self, node: str, backup_id: int, *, complete: bool = False) -> None:
        """Unpin a backup; no effect if it is not open. `complete`: the store has all its parts.

        Raises:
            NotFound: There is no such node.
        """
        request = pb.CloseBackupRequest(
            node=rows.text("node", node), backup_id=backup_id, complete=complete
        )
        await self._anywhere(lambda at: at.admin.CloseBackup, request, final=FINAL)
