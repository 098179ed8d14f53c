"""Request ids: repeats of one request, by a client without a producer, create one set of timers.

    schedule, id "order-4711" --> applied; the answer is remembered until a time on the log's clock
    the same request again    --> the same answer, also from a later leader
    another request, same id  --> rejected
    after that time           --> a new request

Such a client needs no producer number and no stream: the request has an id. It may be a process
that sends one request and dies, or a web server whose users send thousands a second. The leader
decides at append how long the id is remembered, and the entry holds that time. Every replica
therefore forgets the id at the same entry. If the memory is full, the leader rejects new requests:
an answered id is never forgotten before its time.

Records are packed, so that an id takes about 200 bytes of memory, and are kept in pages in log
order: the oldest ones are found at once, and a manifest reads pages that do not change.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Final

from timer.model.columns import RequestId
from timer.model.timer_errors import InvalidRequestError
from timer.model.units import UnixMs
from timer.state.producers import RequestAnswer

REQUESTS_MAX: Final = 524_288
"""Most ids remembered at a time: 1,747 a second over five minutes, 200 bytes of memory each."""
REQUEST_ROWS_MAX: Final = 1 << 22
"""Most rows in all remembered answers: 32 megabytes of due times."""
EXPIRED_MAX: Final = 4096
"""Most ids forgotten at one checkpoint: about seven milliseconds of work."""
PAGE_IDS: Final = 16_384
"""Most ids in a page. A look-up asks each page, 0.1 us; a copy of one takes 0.5 ms."""
GAPS_MAX: Final = 512
"""Gaps of forgotten ids in a page, at most, before it is copied: a walk skips each gap in 1 ns."""
_MASK: Final = (1 << 64) - 1
_HASHED: Final = struct.Struct("<QqQQ")
_HEAD: Final = struct.Struct("<QqQQI")
"""body and until_ms of the request; first_seq, body and number of rows of the answer. Then come
the answer's due_ms and, if the record is longer, the columns of its verdicts."""

Fields = list[Any]
"""A remembered request in a manifest: [text, body, until_ms] and RequestAnswer.pack()."""


class Page(dict[bytes, bytes]):
    """Packed records by id, in log order."""

    __slots__ = ("gaps", "shared")
    shared: bool
    """Whether a manifest reads it: a change makes a copy first."""
    gaps: int
    """Ids forgotten since the page was made. A dict keeps their places until it is copied."""


@dataclass(frozen=True, slots=True)
class RememberedRequests:
    """All remembered requests at one index, as a manifest has them."""

    pages: list[Page]

    def __len__(self) -> int:
        return sum(map(len, self.pages))

    def __iter__(self) -> Iterator[Fields]:
        for text, record in chain.from_iterable(page.items() for page in self.pages):
            yield _fields(text, record)


@dataclass(slots=True)
class RequestIds:
    """All remembered requests that have an id, in log order."""

    sum: int = 0
    """Order-free sum of the requests' hashes, modulo 2 ** 64, for the digest."""
    rows: int = 0
    """Rows in all remembered answers."""
    _pages: list[Page] = field(default_factory=list[Page])
    """New ids go to the last one. None is empty."""
    _count: int = 0
    _open: dict[bytes, RequestAnswer] = field(default_factory=dict[bytes, RequestAnswer])
    """Answers of the entry that is being applied, which may still get verdicts, by id."""

    def stored_answer(self, request: RequestId, now_ms: UnixMs) -> RequestAnswer | None:
        """Return the stored answer of a repeated request. None: the request is new.

        Raises:
            InvalidRequestError: the id belongs to another request that is still remembered.
        """
        place = self._place_of(request.text)
        if place < 0:
            return None
        record = self._pages[place][request.text]
        body, until_ms, *_ = _HEAD.unpack_from(record)
        if until_ms < now_ms:
            return None
        if body != request.body:
            limit = f"belongs to another request, remembered until {until_ms} ms"
            raise InvalidRequestError("request_id", request.text.decode(errors="replace"), limit)
        return self._open.get(request.text) or RequestAnswer.unpack(*_fields(b"", record)[1])

    def accept(self, request: RequestId, answer: RequestAnswer, now_ms: UnixMs) -> None:
        """Store the answer of a new request; forget up to two expired ones.

        The answer may get verdicts until `seal`. A repetition before it gets the same object.
        """
        self.expire(now_ms, 2)
        place = self._place_of(request.text)
        if place >= 0:  # an expired request with the same id
            self._forget(place, request.text)
            self._drop_empty_pages()
        self._store(request.text, _record([request, answer.pack()]))
        self._open[request.text] = answer

    def seal(self) -> None:
        """Store the verdicts of an entry that is applied."""
        for text, answer in self._open.items():
            if answer.verdicts is not None and (place := self._place_of(text)) >= 0:
                page = self._writable_page(place)
                [request, _] = _fields(text, page[text])
                page[text] = _record([request, answer.pack()])
        self._open.clear()

    def _store(self, text: bytes, record: bytes) -> None:
        if not self._pages or len(self._pages[-1]) >= PAGE_IDS:
            self._pages.append(_page({}))
        self._writable_page(-1)[text] = record
        self._count += 1
        self._count_record(text, record, 1)

    def expire(self, now_ms: UnixMs, most: int = EXPIRED_MAX) -> None:
        """Forget the expired requests among the oldest `most`."""
        for place, page in enumerate(self._pages):
            if page.gaps > GAPS_MAX:
                self._pages[place] = page = _page(page)  # noqa: PLW2901
            oldest = [*islice(page.items(), most)]
            for text, record in oldest:
                if _HEAD.unpack_from(record)[1] < now_ms:
                    self._forget(place, text)
            most -= len(oldest)
            if most <= 0:
                break
        self._drop_empty_pages()

    def _forget(self, place: int, text: bytes) -> None:
        page = self._writable_page(place)
        self._count -= 1
        self._count_record(text, page.pop(text), -1)
        page.gaps += 1

    def _writable_page(self, place: int) -> Page:
        """Return a page that may be changed."""
        if self._pages[place].shared:
            self._pages[place] = _page(self._pages[place])
        return self._pages[place]

    def _drop_empty_pages(self) -> None:
        if not all(self._pages):
            self._pages = [page for page in self._pages if page]

    def _count_record(self, text: bytes, record: bytes, times: int) -> None:
        body, until_ms, first_seq, _, rows = _HEAD.unpack_from(record)
        hashed = text + _HASHED.pack(body, until_ms, first_seq, rows)
        each = int.from_bytes(hashlib.blake2b(hashed, digest_size=8).digest(), "little")
        self.sum = (self.sum + times * each) & _MASK
        self.rows += times * rows

    def _place_of(self, text: bytes) -> int:
        """Return the place of the page that has this id, or -1."""
        for place in range(len(self._pages) - 1, -1, -1):
            if text in self._pages[place]:
                return place
        return -1

    def pack(self) -> RememberedRequests:
        """Return the remembered requests in log order; none of them changes later."""
        for page in self._pages:
            page.shared = True
        return RememberedRequests([*self._pages])

    def restore(self, packed: Iterable[Fields]) -> None:
        """Put back the requests that a manifest holds."""
        for fields in packed:
            self._store(fields[0][0], _record(fields))

    def __len__(self) -> int:
        return self._count


def _page(records: dict[bytes, bytes]) -> Page:
    page = Page(records)
    page.shared, page.gaps = False, 0
    return page


def _record(fields: Fields) -> bytes:
    (_, body, until_ms), (_, first_seq, due_ms, answer_body, *verdicts) = fields
    head = _HEAD.pack(body, until_ms, first_seq, answer_body, len(due_ms) // 8)
    return b"".join([head, due_ms, *verdicts])


def _fields(text: bytes, record: bytes) -> Fields:
    body, until_ms, first_seq, answer_body, rows = _HEAD.unpack_from(record)
    due_ms, rest = record[_HEAD.size : _HEAD.size + 8 * rows], record[_HEAD.size + 8 * rows :]
    verdicts = [rest[:rows], rest[rows : 9 * rows], rest[9 * rows :]] if rest else []
    return [[text, body, until_ms], [0, first_seq, due_ms, answer_body, *verdicts]]
