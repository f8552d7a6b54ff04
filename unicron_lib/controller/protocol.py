"""The websockets of agents on the wire."""

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

FRAME_LIMIT_BYTES = 2 << 20
"""Agents cut every text that they pass on: their longest frame has a fraction of it. A longer one ends the connection."""
RESET = 1006


class AgentProtocol(WebSocketsSansIOProtocol):
    """Uvicorn's, which tells a reset connection, close code 1006, from one that has merely ended, 1005."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone; `exc` says why unless its end was orderly."""
        if exc is not None:
            self.queue.put_nowait({"type": "websocket.disconnect", "code": RESET, "reason": str(exc)})
        super().connection_lost(exc)
