"""Messages on a transfer's link: golden bytes, and every unit request outside the memory is refused."""

from __future__ import annotations

import struct

import pytest

from pccl._core.protocol.codec import BLOB_BYTES_MAX
from pccl._core.protocol.state_stream import (
    ASK_MANIFEST,
    MAGIC,
    UNIT,
    StateLinkError,
    Unit,
    UnitRequest,
    check_answer,
    pack_answer,
    pack_orders,
    pack_request,
    unpack_orders,
    unpack_request,
)

from .manifests import describe, row

STATE = describe(row("a", *range(20)), row("empty"), row("z", 1, nbytes=5))


def test_golden_bytes() -> None:
    assert pack_request(UnitRequest(UNIT, 3, 4, 5)).hex() == "50535431" + "02000000030000000400000005000000"
    assert pack_answer(ASK_MANIFEST, 6).hex() == "50535431" + "01000000" + "00" * 12 + "0600000000000000"


@pytest.mark.parametrize(
    "request_", [ASK_MANIFEST, UnitRequest(UNIT, 0, 0, 16), UnitRequest(UNIT, 0, 4, 16), UnitRequest(UNIT, 2, 0, 1)]
)
def test_requests_that_can_be_answered(request_: UnitRequest) -> None:
    assert unpack_request(pack_request(request_), STATE) == request_


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param((MAGIC + 1, 2, 0, 0, 1), id="another language"),
        pytest.param((MAGIC, 3, 0, 0, 1), id="a kind that is none"),
        pytest.param((MAGIC, 1, 0, 0, 1), id="a manifest with blocks"),
        pytest.param((MAGIC, 2, 3, 0, 1), id="a key that is none"),
        pytest.param((MAGIC, 2, 0, 0, 0), id="no blocks"),
        pytest.param((MAGIC, 2, 0, 0, 17), id="more than a unit"),
        pytest.param((MAGIC, 2, 0, 19, 2), id="beyond the end"),
        pytest.param((MAGIC, 2, 0, 0xFFFFFFFF, 1), id="far beyond the end"),
        pytest.param((MAGIC, 2, 1, 0, 1), id="of an empty tensor"),
    ],
)
def test_requests_that_cannot(numbers: tuple[int, ...]) -> None:
    with pytest.raises(StateLinkError):
        unpack_request(struct.pack("<IIIII", *numbers), STATE)


def test_an_answer_must_be_to_the_question() -> None:
    asked = UnitRequest(UNIT, 0, 4, 2)
    check_answer(pack_answer(asked, 10), asked, 10)
    for other in (ASK_MANIFEST, UnitRequest(UNIT, 1, 4, 2), UnitRequest(UNIT, 0, 5, 2), UnitRequest(UNIT, 0, 4, 1)):
        with pytest.raises(StateLinkError, match="something else"):
            check_answer(pack_answer(other, 10), asked, 10)
    with pytest.raises(StateLinkError, match="announced 1152921504606846976 bytes, where 10 belong"):
        check_answer(pack_answer(asked, 1 << 60), asked, 10)


def test_orders_come_back_with_the_digests_that_they_need() -> None:
    units = [Unit(0, 3, 2, 0), Unit(2, 0, 1, 5)]
    (blob,) = pack_orders(units, STATE)
    wanted = list(unpack_orders(blob, STATE))
    assert [one.request for one in wanted] == [UnitRequest(UNIT, 0, 3, 2), UnitRequest(UNIT, 2, 0, 1)]
    assert [one.nbytes for one in wanted] == [2 << 18, 5]
    assert wanted[0].digests == struct.pack("<QQ", 3, 4)


def test_many_orders_take_several_messages() -> None:
    units = [Unit(0, 0, 16, 0)] * 500
    blobs = pack_orders(units, STATE)
    assert all(len(blob) <= BLOB_BYTES_MAX for blob in blobs)
    assert sum(len(list(unpack_orders(blob, STATE))) for blob in blobs) == 500
    assert pack_orders([], STATE) == []
