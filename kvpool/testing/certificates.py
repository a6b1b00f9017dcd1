"""Certificates for tests: an authority of their own and what it signs, in date or not."""

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvpool.wire.credentials import Security


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A certificate and its key, as PEM files."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates for localhost and 127.0.0.1, into `directory`."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        self.cert = directory / f"{name}.pem"
        self.cert.write_bytes(_pem(_signed(self._name, self._key.public_key(), self._name, self._key, authority=True)))

    def sign(self, name: str, *, days: int = 30, hosts: tuple[str, ...] = ("localhost", "127.0.0.1")) -> Pair:
        """A certificate for `hosts` that ends in `days` from now (negative: it has ended)."""
        key = ec.generate_private_key(ec.SECP256R1())
        pair = Pair(cert=self._directory / f"{name}.crt", key=self._directory / f"{name}.key")
        pair.cert.write_bytes(_pem(_signed(_named(name), key.public_key(), self._name, self._key, days=days, hosts=hosts)))
        secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        pair.key.write_bytes(secret)
        pair.key.chmod(0o600)
        return pair

    def server(self, *, mutual: bool = False) -> Security:
        """What a server runs with."""
        pair = self.sign("server")
        return Security(tls_cert=pair.cert, tls_key=pair.key, tls_ca=self.cert, mutual=mutual)

    def client(self, token_file: Path | None = None, *, shows: Pair | None = None) -> Security:
        """What a client runs with."""
        cert, key = (None, None) if shows is None else (shows.cert, shows.key)
        return Security(tls_ca=self.cert, token_file=token_file, tls_cert=cert, tls_key=key)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _signed(
    subject: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    authority: bool = False,
    days: int = 30,
    hosts: tuple[str, ...] = (),
) -> x509.Certificate:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=60))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_general(host) for host in hosts]), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
