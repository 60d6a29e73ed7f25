"""The bytes as they are."""

from kvstore.codecs.codec import BlockForm, Refusal, check_segments
from kvstore.codecs.pages import Bytes


class Identity:
    """Copies. Its bytes are the engine's, so only engines of equal layout may exchange them."""

    name = "identity"
    lossy = False
    precision = "exact"

    def segment_bytes(self, form: BlockForm) -> int:
        return form.layout.segment_bytes

    def encode(self, form: BlockForm, segments: Bytes, out: Bytes) -> Refusal | None:
        self._copy(form, ("segments", segments), ("encoded", out))
        return None

    def decode(self, form: BlockForm, encoded: Bytes, out: Bytes) -> None:
        self._copy(form, ("encoded", encoded), ("segments", out))

    def _copy(self, form: BlockForm, source: tuple[str, Bytes], target: tuple[str, Bytes]) -> None:
        size = form.layout.segment_bytes
        check_segments(*source, size)
        check_segments(*target, size, len(source[1]))
        target[1][:] = source[1]
