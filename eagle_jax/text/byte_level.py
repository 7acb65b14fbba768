"""The byte alphabet of GPT-2: every byte written as one printable character, as byte-level BPE vocabularies do."""


def _alphabet() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    # The bytes with no printable character of their own take the code points from 256 on, in order.
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _alphabet()


def token_bytes(token: str) -> bytes:
    """The bytes that a token stands for.

    A token with any character outside the alphabet, such as an added token with a space in it, stands for its own
    UTF-8; the `ByteLevel` decoder of `tokenizers` has the same rule.
    """
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode("utf-8")
