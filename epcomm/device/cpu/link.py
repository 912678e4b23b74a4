"""A connection to a rank on another host: two threads of the host, one that sends records, one that carries them out.

On the wire a record is its segment's number, an offset there, a number of bytes (or what the record does instead) and
a value, 8 bytes each; then the bytes. Both ends are compiled and hold no GIL; bytes go from segment to segment. A word
is raised once the bytes before it are in place, and nothing that a peer sends is written outside of a live segment.
"""

from __future__ import annotations

import errno
import socket

from numba import types

from epcomm.device.cpu.compile import device, host_function
from epcomm.device.cpu.memory import copy_bytes, exchange, load_acquire, set_word, store_release, word
from epcomm.device.cpu.network import MARKS, NOTHING, NUM_BYTES, NUMBER, RAISES, SEMAPHORE, SOURCE, STOP, TAKEN, WINDOW
from epcomm.device.cpu.network import record as record_at
from epcomm.device.cpu.system import last_error, receive_bytes, semaphore_wait, send_message

HEADER_BYTES = 32  # of a record: WINDOW, OFFSET, NUM_BYTES, value

# ---- link (words): what it is made with, then what its threads tell
SOCKET, OUTBOX, SEGMENTS = range(3)
SENT_BYTES, SENT, ERROR = 8, 9, 10  # by the thread that sends
#: SENT_BYTES: of segments. SENT: records of which nothing is read any more. ERROR: errno of what broke the link, or 0.
MARKER, WRITES, BEGIN, END, HEADER = 16, 17, 18, 19, 20  # by the thread that receives
#: MARKER: the number in the last record that MARKS. WRITES: 1 + the segment it writes to now, or 0.
#: BEGIN, END: what of BUFFER was received and isn't used yet. HEADER: of the record at hand.
BUFFER, BUFFER_BYTES = 32, 8192  # word, bytes
_MESSAGE = BUFFER + BUFFER_BYTES // 8  # struct msghdr, of which all but the vectors and their number is 0
_MESSAGE_VECTORS, _MESSAGE_COUNT = 2, 3
_HEADERS = _MESSAGE + 8
_MOST_RECORDS = 256  # at a time: with their bytes they fit into one call of the system (IOV_MAX is 1024)
_VECTORS = _HEADERS + _MOST_RECORDS * HEADER_BYTES // 8
LINK_WORDS = _VECTORS + 2 * 2 * _MOST_RECORDS

# ---- table of segments (words): how many there are, then for each its address, 0 if it was freed, and its size
NUM_SEGMENTS = 0
SEGMENT, SEGMENT_WORDS = 2, 2

# ---- results of `receive_records`
CLOSED, GOT_INVALID = range(2)

_NO_SIGNAL, _WAIT_FOR_ALL, _INTERRUPTED = int(socket.MSG_NOSIGNAL), int(socket.MSG_WAITALL), errno.EINTR


# ---- sending


@device
def _is_complete(outbox, number):
    return load_acquire(record_at(outbox, number) + 8 * NUMBER) == number + 1


@device
def _await_record(outbox, number):
    """True once a record is complete; False if the outbox was stopped and has no more."""
    while not _is_complete(outbox, number):
        if load_acquire(outbox + 8 * STOP):
            return _is_complete(outbox, number)  # before it was stopped
        semaphore_wait(outbox + 8 * SEMAPHORE)
    return True


@device
def _add_vector(vectors, count, address, num_bytes):
    """Adds bytes to those to send, as part of the last vector if they follow it; returns how many vectors there are."""
    if count > 0 and word(vectors, 2 * count - 2) + word(vectors, 2 * count - 1) == address:
        set_word(vectors, 2 * count - 1, word(vectors, 2 * count - 1) + num_bytes)
        return count
    set_word(vectors, 2 * count, address)
    set_word(vectors, 2 * count + 1, num_bytes)
    return count + 1


@device
def _send_vectors(link, count):
    """Sends all bytes of the vectors; returns 0, or errno if the link is broken."""
    message, vectors, sent = link + 8 * _MESSAGE, link + 8 * _VECTORS, 0
    while sent < count:
        set_word(message, _MESSAGE_VECTORS, vectors + 16 * sent)
        set_word(message, _MESSAGE_COUNT, count - sent)
        num_bytes = send_message(word(link, SOCKET), message, _NO_SIGNAL)
        if num_bytes < 0:
            error = last_error()
            if error != _INTERRUPTED:
                return error
            continue
        while sent < count and num_bytes >= word(vectors, 2 * sent + 1):
            num_bytes -= word(vectors, 2 * sent + 1)
            sent += 1
        if num_bytes > 0:
            set_word(vectors, 2 * sent, word(vectors, 2 * sent) + num_bytes)
            set_word(vectors, 2 * sent + 1, word(vectors, 2 * sent + 1) - num_bytes)
    return 0


@host_function("send_records", types.int64(types.int64))
def load_send_records(link):
    """``send_records(link)``: sends what is written down until the outbox was stopped and is empty; returns 0.

    Or errno as soon as the link breaks; if called again it drops what is written down.
    """
    outbox, headers, vectors = word(link, OUTBOX), link + 8 * _HEADERS, link + 8 * _VECTORS
    first = word(link, SENT)
    while _await_record(outbox, first):
        count = num_headers = num_vectors = num_bytes = 0
        while count < _MOST_RECORDS and _is_complete(outbox, first + count):
            record = record_at(outbox, first + count)
            count += 1
            length, header = word(record, NUM_BYTES), headers + HEADER_BYTES * num_headers
            if length == NOTHING:
                continue
            num_headers += 1
            copy_bytes(header, record + 8 * WINDOW, HEADER_BYTES)
            num_vectors = _add_vector(vectors, num_vectors, header, HEADER_BYTES)
            if length > 0:
                set_word(header, 3, 0)  # an address here is nobody else's business
                num_vectors = _add_vector(vectors, num_vectors, word(record, SOURCE), length)
                num_bytes += length
        first += count
        store_release(outbox + 8 * TAKEN, first)
        was_open = word(link, ERROR) == 0
        if was_open:
            set_word(link, ERROR, _send_vectors(link, num_vectors))
        store_release(link + 8 * SENT_BYTES, word(link, SENT_BYTES) + num_bytes)
        store_release(link + 8 * SENT, first)
        if was_open and word(link, ERROR) != 0:
            return word(link, ERROR)
    return 0


# ---- receiving


@device
def _receive(link, address, num_bytes, flags):
    """Receives up to `num_bytes`; 0 if the link is closed or broken."""
    received = receive_bytes(word(link, SOCKET), address, num_bytes, flags)
    while received < 0 and last_error() == _INTERRUPTED:
        received = receive_bytes(word(link, SOCKET), address, num_bytes, flags)
    return max(received, 0)


@device
def _next_header(link):
    """Gets the next record's header; False if the link is closed."""
    buffer = link + 8 * BUFFER
    while word(link, END) - word(link, BEGIN) < HEADER_BYTES:
        begin, end = word(link, BEGIN), word(link, END)
        if BUFFER_BYTES - begin < HEADER_BYTES or begin == end:
            copy_bytes(buffer, buffer + begin, end - begin)  # less than a header, from near the end: no overlap
            begin, end = 0, end - begin
        received = _receive(link, buffer + end, BUFFER_BYTES - end, 0)
        set_word(link, BEGIN, begin)
        set_word(link, END, end + received)
        if received == 0:
            return False
    copy_bytes(link + 8 * HEADER, buffer + word(link, BEGIN), HEADER_BYTES)
    set_word(link, BEGIN, word(link, BEGIN) + HEADER_BYTES)
    return True


@device
def _receive_payload(link, to, num_bytes):
    """Puts the bytes that follow at `to`, or nowhere if that is 0; False if the link is closed before."""
    buffer, begin = link + 8 * BUFFER, word(link, BEGIN)
    done = min(num_bytes, word(link, END) - begin)
    if to != 0:
        copy_bytes(to, buffer + begin, done)
    set_word(link, BEGIN, begin + done)
    while done < num_bytes:  # so the buffer is empty
        if to != 0:
            received = _receive(link, to + done, num_bytes - done, _WAIT_FOR_ALL)
        else:
            received = _receive(link, buffer, min(BUFFER_BYTES, num_bytes - done), 0)
        if received == 0:
            return False
        done += received
    return True


@device
def _is_valid(link, window, offset, num_bytes):
    segments = word(link, SEGMENTS)
    if not 0 <= window < load_acquire(segments + 8 * NUM_SEGMENTS):
        return False
    size = word(segments, SEGMENT + SEGMENT_WORDS * window + 1)
    if num_bytes == RAISES:
        return 0 <= offset <= size - 8 and offset % 8 == 0
    return num_bytes >= 0 and 0 <= offset <= size - num_bytes


@host_function("receive_records", types.int64(types.int64))
def load_receive_records(link):
    """``receive_records(link)``: carries out what the peer sends, until the link is closed or a record can't be."""
    while _next_header(link):
        window, offset = word(link, HEADER), word(link, HEADER + 1)
        num_bytes, value = word(link, HEADER + 2), word(link, HEADER + 3)
        if num_bytes == MARKS:
            store_release(link + 8 * MARKER, value)
            continue
        if not _is_valid(link, window, offset, num_bytes):
            return GOT_INVALID
        exchange(link + 8 * WRITES, window + 1)  # before the address is read: see `free_segment`
        to, is_open = load_acquire(word(link, SEGMENTS) + 8 * (SEGMENT + SEGMENT_WORDS * window)), True
        if num_bytes != RAISES:
            is_open = _receive_payload(link, to + offset if to else 0, num_bytes)
        elif to != 0:
            store_release(to + offset, value)
        store_release(link + 8 * WRITES, 0)
        if not is_open:
            return CLOSED
    return CLOSED


@host_function("free_segment", types.void(types.int64, types.int64))
def load_free_segment(segments, number):
    """``free_segment(segments, number)``: what still arrives for a segment goes nowhere.

    A link whose WRITES doesn't name the segment after this won't write to it any more.
    """
    exchange(segments + 8 * (SEGMENT + SEGMENT_WORDS * number), 0)
