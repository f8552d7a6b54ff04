"""What NCCL, Gloo, PyTorch's stores and sockets say when a peer does not answer any more.

A row: name, kind, role, alternatives of its pattern, a line that it is found in.
"""

from unicron_lib.diagnosis.rule_table_hardware import Row
from unicron_lib.domain.failures import ErrorKind

_K = ErrorKind

ROWS: tuple[Row, ...] = (
    (
        "peer-gone",
        _K.NCCL_REMOTE_ERROR,
        "root",
        (
            r"ncclRemoteError",
            r"remote process exited or there was a network error",
            r"Got completion (?:from peer|with error)",
            r"Connection closed by remote peer",
            r"remote process exiting prematurely",
            r"retcode 6\b",
        ),
        ("NCCL WARN NET/IB : Got completion from peer 10.1.4.7<52314> with status=12 opcode=0 len=0 vendor err 129 (Recv)"),
    ),
    (
        "refused",
        _K.CONNECTION_REFUSED,
        "root",
        (
            r"[Cc]onnection refused",
            r"ECONNREFUSED",
            r"errno:? 111\b",
            r"Connect call failed",
        ),
        (
            "[W socket.cpp:663] [c10d] The client socket has failed to connect to [head]:29500 (errno: 111 - "
            "Connection refused)."
        ),
    ),
    (
        "reset",
        _K.CONNECTION_RESET,
        "root",
        (
            r"[Cc]onnection (?:was )?(?:reset|closed by peer|aborted)",
            r"ECONNRESET",
            r"errno:? 104\b",
            r"Errno 104\b",
            r"RemoteDisconnected",
            r"ServerDisconnected",
            r"[Ss]ocket closed\b",
            r"Call to (?:send|recv)\w{0,4} [^\n]{0,80}Broken pipe",
        ),
        "NCCL WARN NET/Socket : Call to recv from 10.1.4.7<41222> failed : Connection reset by peer",
    ),
    (
        "store-gone",
        _K.CONNECTION_RESET,
        "root",
        (
            (
                r"(?:Dist\w{4,16}|Runtime)Error: [^\n]{0,200}(?:failed to recv, got 0 bytes|Connection was likely closed|"
                r"recvValue failed|sendBytes failed)"
            ),
        ),
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
    ),
    (
        "pipe",
        _K.CONNECTION_RESET,
        "cascade",
        (
            r"Broken pipe",
            r"EPIPE\b",
            (
                r"TCPStore[^\n]{0,200}(?:recvValue failed|failed to recv|sendBytes failed|Connection reset|Failed to "
                r"check)"
            ),
            r"recvValue failed",
            r"sendBytes failed",
            r"recvVector failed",
            r"Connection was likely closed",
        ),
        "[E TCPStore.cpp:137] sendBytes failed on SocketImpl(fd=64): Broken pipe",
    ),
    (
        "network",
        _K.NETWORK_ERROR,
        "root",
        (
            r"No route to host",
            r"[Nn]etwork is (?:unreachable|down)",
            r"Temporary failure in name resolution",
            r"Name or service not known",
            r"[Gg]loo connectFullMesh failed",
            r"Connection timed out",
            r"Timed out after \d{1,7} seconds waiting for clients",
            r"(?:client|server) socket has (?:timed out|failed to listen)",
            r"Address already in use",
            r"EADDRINUSE",
        ),
        ("RuntimeError: The client socket has timed out after 600s while trying to connect to (head, 29500): No route to host"),
    ),
    (
        "nccl-system",
        _K.NETWORK_ERROR,
        "root",
        (
            r"unhandled system error",
            r"ncclSystemError",
            r"ncclInternalError",
            r"NCCL error: [a-z]",
            r"ncclUnhandledCudaError",
            r"unhandled cuda error",
        ),
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
    ),
    (
        "collective-timeout",
        _K.NCCL_TIMEOUT,
        "root",
        (
            r"[Ww]atchdog caught collective operation timeout",
            r"Some NCCL operations have failed or timed out",
            r"(?:first|found|detected)[^\n]{0,60} (?:by watchdog|timeout)[^\n]{0,30} at work",
            r"collective operation timeout: WorkNCCL",
            r"NCCL (?:watchdog|communicator)[^\n]{0,80}(?:timed out|timeout)\b",
            r"ran for \d{1,12} milliseconds before timing out",
            r"failed to pass monitoredBarrier",
            r"watchdog got stuck for",
            r"[Tt]imeout at NCCL work",
            r"due to a collective timeout",
            r"Timed out waiting \d{1,12} ?ms for (?:recv|send)",
            r"[Hh]eartbeat monitor timed out",
        ),
        ("[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1024, OpType=ALLREDUCE, Timeout(ms)=600000)"),
    ),
)
