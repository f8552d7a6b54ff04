"""What network cards say of their links, and NCCL, Gloo, PyTorch's stores and sockets say when a peer does not answer any more.

A row: name, kind, role, alternatives of its pattern, a line that it is found in.
"""

from unicron_lib.diagnosis.rule_table_hardware import Row
from unicron_lib.domain.failures import ErrorKind

_K = ErrorKind

ROWS: tuple[Row, ...] = (
    (
        "link-down",
        _K.LINK_FLAPPING,
        "root",
        (
            r"[Pp]ort \d{1,3} is not active(?:: state|!| any ?more)",
            r"[Ss]tate changed?:? (?:\d: ?)?ACTIVE (?:->|to) (?:\d: ?)?(?:DOWN|INIT)",
            (
                r"\b(?:port|HCA|NIC|interface|device) (?:mlx5|rocep|ib[ps]?\d|rdmap|irdma|bnxt_re|ens\d|eth\d|"
                r"efa)\w{0,16}(?:[/:]\d{1,2})? (?:is |went |has gone |became )?(?:down|DOWN|Down|inactive)\b"
            ),
            r"[Aa]sync (?:fatal )?event ?: (?:port (?:error|down)|local catastrophic error|device fatal|link down)",
            r"Port: \d{1,3} Link DOWN",
            r"[Pp]ort \d{1,3}(?: link)?(?: state)? (?:changed to |went |is )?(?:DOWN|[Dd]own)\b",
            r"link status definitely down",
            r"(?:NIC )?[Ll]ink (?:is |went )?(?:DOWN|[Dd]own)\b",
            r"NETDEV WATCHDOG",
            r"[Ll]ink flap(?:ping|ped|s)?\b",
            r"link_downed[^\n]{0,30}(?:increas|[1-9])",
            r"Port module event(?:\[error\])?: [^\n]{0,60}(?:unplugged|error|[Pp]ower)",
            r"carrier: link disconnected",
            r"state changed?:? ACTIVE (?:->|to) (?:DOWN|INIT)",
            r"[Cc]able (?:is )?(?:unplugged|disconnected)",
            r"[Ll]ost carrier",
            r"NIC \S{1,32} (?:is )?(?:down|link down)",
            r"IBV_EVENT_PORT_ERR",
            r"port (?:error|down) event",
            r"physical state[^\n]{0,40}(?:Polling|Disabled|LinkErrorRecovery)",
            r"PORT_DOWN|[Pp]ort state[^\n]{0,24}\b(?:DOWN|Down)\b",
            r"link status down",
            r"carrier lost",
        ),
        "mlx5_core 0000:5e:00.0 ib2: Link down",
    ),
    (
        "link-state",
        _K.LINK_FLAPPING,
        "root",
        (
            r"[Ss]ymbol[_ -]?[Ee]rrors?\b[^\n]{0,40}(?:exceed|above)",
            r"(?:[Ee]ffective|[Rr]aw|FEC) BER\b[^\n]{0,40}(?:exceed|above)",
            r"[Tt]ransceiver\b[^\n]{0,40}(?:fail|fault|removed|unplugged|not present)",
            (
                r"(?:[Pp]ort|[Ll]ink|HCA)\b[^\n]{0,30}\b[Ss]tate\b[^\n]{0,30}(?:to|[>=:])\W{0,2}"
                r"(?:DOWN|[Dd]own|I(?:NIT|nit)\b|I(?:NACTIVE|nactive)\b|DISABLED)"
            ),
            (
                r"(?:[Pp]ort|[Ll]ink|NIC|HCA|mlx5_\d{1,2}|\bib\d{1,2})\b[^\n]{0,40} (?:became|turned|transitioned to|has gone|"
                r"goes) \"?(?:DOWN|[Dd]own|inactive|INACTIVE)\b"
            ),
            r"[Ll]ine protocol [^\n]{0,80}\bdown\b|IF_DOWN",
            r"[Ll]ink_?[Ee]rror_?[Rr]ecovery(?:_counter)?[^\n]{0,30}(?:increas|exceed|[1-9])",
            r"(?:[Ii]nfini[Bb]and|RDMA|RoCE|mlx5|HCA)\b[^\n]{0,60}\b(?:link|port) (?:lost|failed|failure|(?:is )?not active)\b",
        ),
        "mlx5_2: port 1 link state changed from ACTIVE to DOWN",
    ),
    (
        "peer-gone",
        _K.NCCL_REMOTE_ERROR,
        "root",
        (
            (
                r"NCCL WARN (?:NET/\w{2,20}|\[?AWS-OFI-NCCL\]?|Libfabric|UCX)\b[^\n]{0,80}(?:completed with error|"
                r"unreachable|[Dd]isconnected|[Cc]onnection (?:lost|closed)|[Ee]ndpoint timeout|request failed)"
            ),
            r"failed : (?:remote peer closed|Software caused connection abort)",
            r"returned error code from peer",
            r"NCCL WARN [^\n]{0,120}\bres=6\b",
            r"NCCL [Ee]rror 6\b",
            r"IBV_WC_(?!SUCCESS)\w{4,30}",
            r"\b[Tt]ransport retry count(?:er)? exceeded",
            r"RNR [Rr]etry [Cc]ount(?:er)? [Ee]xceeded",
            r"[Aa]sync(?: fatal)? event ?: (?:QP|CQ)\b[^\n]{0,24} (?:error|fatal)",
            r"\bremote peer closed\b",
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
            r"Errno 111\b",
            r"failed to connect to all addresses",
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
            r"lost communication with a remote daemon",
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
            r"failed to send a keep-alive heartbeat to the rendezvous",
            r"[Cc]onnection to the C10d store has failed",
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
            r"Max retries exceeded with url",
            r"ibv_(?:modify_qp|reg_mr\w{0,12}|create_qp|poll_cq)\b[^\n]{0,20}failed with",
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
        ),
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
    ),
    (
        "nccl-cuda",
        _K.CUDA_ERROR,
        "root",
        (r"ncclUnhandledCudaError", r"unhandled cuda error"),
        "ncclUnhandledCudaError: Call to CUDA function failed.",
    ),
    (
        "collective-timeout",
        _K.NCCL_TIMEOUT,
        "root",
        (
            r"attempting to dump debug info, due to",
            r"(?:flight recorder|[Rr]eceived a) dump signal",
            r"\bto signal dumping\b",
            r"timeout caused pair closure",
            r"due to collective timeout|\]: collective timeout\b",
            r"\bwait timeout after \d{1,12} ?ms",
            r"[Ss]talled ranks?: ?\d",
            r"by subset of ranks and are waiting",
            r"DeepEP\b[^\n]{0,24}timeout",
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
