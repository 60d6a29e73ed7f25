"""Mutual TLS between nodes, for the gRPC channel and the bulk socket alike."""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

_NAME = "moonpool"
"""Every node's certificate is for this name: nodes are reached by addresses that come and go."""


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """PEM files: the authority that signs all nodes' certificates, and this node's own certificate and key.

    The certificate's subject alternative names must have the DNS name `moonpool`.
    """

    ca: Path
    cert: Path
    key: Path

    def server_credentials(self) -> grpc.ServerCredentials:
        """Clients without a certificate of the authority are refused. Raises OSError for a missing file."""
        pair = (self.key.read_bytes(), self.cert.read_bytes())
        return grpc.ssl_server_credentials([pair], self.ca.read_bytes(), require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(
            self.ca.read_bytes(), self.key.read_bytes(), self.cert.read_bytes()
        )

    @property
    def channel_options(self) -> list[tuple[str, str]]:
        return [("grpc.ssl_target_name_override", _NAME)]

    def accepting(self) -> ssl.SSLContext:
        """For the end that accepted the connection."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def connecting(self) -> ssl.SSLContext:
        """For the end that opened it; wrap with `server_hostname=NAME`."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    @property
    def server_name(self) -> str:
        return _NAME

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self.ca)
        context.load_cert_chain(self.cert, self.key)
        return context
