"""Masks that cancel in a sum: key agreement, secret sharing and streams, as in Bonawitz et al. (2017).

Importing this file needs `cryptography`. Nothing here knows of runs or sites.
"""

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

PRIME = 2**521 - 1  # of the field in which secrets are shared
SECRET, SHARE = 32, 66  # bytes of a secret, and of a share of one
SEALED = 2 * SHARE + 16  # bytes of two shares under authenticated encryption
_CHUNK = 1 << 20  # bytes of a stream that are in memory at once
_ZEROS = bytes(_CHUNK)


def new_secret() -> bytes:
    """Return a fresh secret; every one is also a private key."""
    return secrets.token_bytes(SECRET)


def public_key(private: bytes) -> bytes:
    """Return the public key of a private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed_key(private: bytes, public: bytes, purpose: str) -> bytes:
    """Return the key for this purpose that two parties share; ValueError for a public key that fixes the result."""
    shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    return derived(shared, purpose)


def derived(secret: bytes, purpose: str) -> bytes:
    """Return a key for one purpose. Keys for different purposes tell nothing of each other or of the secret."""
    return HKDF(hashes.SHA256(), SECRET, None, f"rookery secure sum: {purpose}".encode()).derive(secret)


def commitment(secret: bytes) -> bytes:
    """Return a text that identifies a secret without revealing it."""
    return hashlib.sha256(b"rookery commitment" + secret).digest()


# Secret sharing: any `threshold` shares of a secret determine it, and fewer reveal nothing.


def split(secret: bytes, threshold: int, places: Iterable[int]) -> dict[int, bytes]:
    """Return a share of the secret for each place, a positive integer."""
    coefficients = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    shares = {}
    for place in places:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * place + coefficient) % PRIME
        shares[place] = value.to_bytes(SHARE)
    return shares


def joiner(places: Sequence[int]) -> dict[int, int]:
    """Return the factors with which shares at these places, as many as the threshold, add up to the secret."""
    factors = {}
    for own in places:
        above = below = 1
        for other in places:
            if other != own:
                above, below = above * other % PRIME, below * (other - own) % PRIME
        factors[own] = above * pow(below, -1, PRIME) % PRIME
    return factors


def joined(shares: Mapping[int, bytes], factors: Mapping[int, int]) -> bytes:
    """Return the secret; ValueError if these are not shares of one."""
    secret = sum(factors[place] * int.from_bytes(shares[place]) for place in factors) % PRIME
    if secret.bit_length() > 8 * SECRET:
        raise ValueError("the shares are not those of one secret")
    return secret.to_bytes(SECRET)


def seal(key: bytes, number: int, content: bytes) -> bytes:
    """Encrypt and authenticate; a key has one content for each number."""
    return ChaCha20Poly1305(key).encrypt(number.to_bytes(12), content, None)


def unseal(key: bytes, number: int, sealed: bytes) -> bytes:
    """Decrypt; ValueError if it was not encrypted with this key and number."""
    try:
        return ChaCha20Poly1305(key).decrypt(number.to_bytes(12), sealed, None)
    except InvalidTag:
        raise ValueError("an encrypted share is not what its sender wrote") from None


def add_stream(values: np.ndarray, key: bytes, sign: int = 1) -> None:
    """Add the key's stream of uniform integers to a flat array of unsigned integers, in place, or subtract it."""
    stream = Cipher(ChaCha20(key, bytes(16)), None).encryptor()
    little, step = values.dtype.newbyteorder("<"), _CHUNK // values.dtype.itemsize
    combine = np.add if sign > 0 else np.subtract
    for begin in range(0, len(values), step):
        part = values[begin : begin + step]
        combine(part, np.frombuffer(stream.update(_ZEROS[: part.nbytes]), little), out=part)
