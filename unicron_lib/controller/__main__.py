"""`python -m unicron_lib.controller`: the agents' endpoint on the control host."""

import argparse
import logging
import socket
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from unicron_lib.adapters.stores import check_store, open_store
from unicron_lib.agent.access import read_token
from unicron_lib.controller.app import create_app
from unicron_lib.controller.protocol import FRAME_LIMIT_BYTES, AgentProtocol
from unicron_lib.controller.service import SNOOZE_S
from unicron_lib.controller.sight import BLIND_S
from unicron_lib.errors import StoreError, UserError
from unicron_lib.journal import Journal

SHUTDOWN_S = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the controller; 2 for what the user has to correct."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        token = read_token(options.token_file)
        _check_certificate(options.ssl_certfile, options.ssl_keyfile)
        listener = _listen(options.host, options.port)
        store = open_store(options.store_url)
        check_store(store)
        journal = Journal(store)
        app = create_app(
            journal=journal,
            token=token,
            known=journal.refresh(),
            snooze_s=options.scale_up_snooze_s,
            blind_s=options.blind_s,
        )
    except (UserError, StoreError) as error:
        print(f"unicron controller: {error}", file=sys.stderr)  # noqa: T201  # the user's answer
        return 2
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
        ws=AgentProtocol,
        ws_max_size=FRAME_LIMIT_BYTES,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
    )
    uvicorn.Server(config).run(sockets=[listener])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m unicron_lib.controller", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--store-url", required=True, metavar="URL", help="s3://bucket/prefix or file:///dir")
    parser.add_argument(
        "--scale-up-snooze-s",
        type=_seconds,
        default=SNOOZE_S,
        metavar="S",
        help="a node that was lost twice in 10 min gets no ranks before it has stayed for so long (default 600; 0: at once)",
    )
    parser.add_argument(
        "--blind-s",
        type=_seconds,
        default=BLIND_S,
        metavar="S",
        help="more than half of the nodes (2 at least) that fall silent at once are lost only after so long, since it may be "
        "this host's network that broke (default 60; 0: they are judged like any other)",
    )
    parser.add_argument("--ssl-certfile", type=Path, help="certificate chain in PEM: agents then dial wss://, flows https://")
    parser.add_argument("--ssl-keyfile", type=Path, help="its private key, if it is not in the same file")
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a finite number that is not negative")
    return value


def _check_certificate(certificate: Path | None, key: Path | None) -> None:
    if certificate is None:
        if key is not None:
            raise UserError("--ssl-keyfile is given without --ssl-certfile: give both, or none to serve without TLS")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")  # never ask on a terminal
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        files = f"{certificate} and {key}" if key else str(certificate)
        raise UserError(f"no TLS with {files}: {error}; give a certificate and its unencrypted key in PEM") from None


def _listen(host: str, port: int) -> socket.socket:
    """Take the port before anything else is started."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off, 40 ms an answer, only where the protocol is named.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no such port"
        raise UserError(f"cannot listen on {host}:{port}: {reason}; stop what uses it or choose another --port") from None
    listener.listen(128)
    return listener


if __name__ == "__main__":
    sys.exit(main())
