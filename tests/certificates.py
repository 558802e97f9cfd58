"""Certificates for tests: an authority of our own, and what it signs."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


class Authority:
    """Signs certificates; its own is in the file `ca`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("Authority of a test")
        self.ca = folder / "ca.pem"
        made = _builder(self._name, self._name, self._key.public_key(), timedelta(days=1))
        authority = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.ca.write_bytes(authority.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def issue(self, name: str, life: timedelta = timedelta(days=1)) -> tuple[Path, Path]:
        """The files of a certificate for this machine, and of its key; a repeat of the name replaces them."""
        key = ec.generate_private_key(ec.SECP256R1())
        places = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        made = _builder(_name(name), self._name, key.public_key(), life)
        signed = made.add_extension(x509.SubjectAlternativeName(places), critical=False).sign(
            self._key, hashes.SHA256()
        )
        cert, private = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        cert.write_bytes(signed.public_bytes(Encoding.PEM))
        return cert, private


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, life: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return x509.CertificateBuilder(
        issuer, subject, key, x509.random_serial_number(), now - timedelta(days=1), now + life
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
