"""What single tokens stand for: their bytes and text, for log-probabilities."""

from functools import lru_cache
from typing import Any

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer
from tokenizers.decoders import ByteLevel

from dflash_mlx.detokenizing import decoded


class Vocabulary:
    """Token ids to bytes. A token of a byte-level vocabulary may be a part of a character."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        detokenizer = tokenizer.detokenizer
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._byte_level = isinstance(detokenizer, BPEStreamingDetokenizer) or isinstance(decoder, ByteLevel)
        self._sentencepiece = isinstance(detokenizer, SPMStreamingDetokenizer)
        self._added = set(getattr(tokenizer, "added_tokens_decoder", None) or ())
        self.bytes_of = lru_cache(maxsize=65536)(self._bytes_of)

    def text_of(self, token: int) -> str:
        """Its text; bytes that are no whole character become U+FFFD."""
        return self.bytes_of(token).decode("utf-8", errors="replace")

    def dropped_at_start(self, token: int) -> int:
        """How many bytes of an answer's first token are not shown: mlx-lm's detokenizers leave out a space there."""
        shown = decoded(self.tokenizer, [token])
        return int(self.bytes_of(token).startswith(b" ") and not shown.startswith(" "))

    def _bytes_of(self, token: int) -> bytes:
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""  # a row of the model's output that no token belongs to
        if token not in self._added:
            if self._byte_level and all(c in _BYTES for c in piece):
                return bytes(_BYTES[c] for c in piece)
            if self._sentencepiece:
                if len(piece) == 6 and piece.startswith("<0x"):
                    return bytes([int(piece[3:5], 16)])
                return str(piece.replace("▁", " ")).encode()
        return str(self.tokenizer.decode([token])).encode() or str(piece).encode()


def _byte_alphabet() -> dict[str, int]:
    """The letters that byte-level vocabularies write bytes with (GPT-2): printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()
