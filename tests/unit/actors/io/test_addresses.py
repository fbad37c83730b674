"""Addresses as users write them, and common mistakes in them."""

from __future__ import annotations

import socket

import pytest

from pccl.actors.io.addresses import format_address, parse_address, parse_listen_address, resolve


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:48148", ("127.0.0.1", 48148)),
        ("master.example.org:1", ("master.example.org", 1)),
        ("[::1]:48148", ("::1", 48148)),
        ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
    ],
)
def test_an_address_is_host_and_port(text: str, expected: tuple[str, int]) -> None:
    """Goal: host names, IPv4 and IPv6 addresses are parsed, and formatted back unchanged."""
    assert parse_address(text) == expected
    assert format_address(*expected) == text


@pytest.mark.parametrize(
    ("text", "host"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "localhost"), ("[::1]", "::1"), ("localhost:", "localhost")],
)
def test_a_port_may_be_left_out_where_there_is_a_usual_one(text: str, host: str) -> None:
    """Goal: the default port is used, and only where one was given."""
    assert parse_address(text, 48148) == (host, 48148)
    with pytest.raises(ValueError, match="must be host:port"):
        parse_address(text)


@pytest.mark.parametrize(
    "text",
    ["", ":", ":48148", "host:http", "host:-1", "host:65536", "host:1.5", "host: 1", "host:²", "[]:1"],
)
def test_what_is_no_address_is_shown_how(text: str) -> None:
    """Goal: the error repeats what was written and gives an example of each kind."""
    with pytest.raises(ValueError, match="like 10.0.0.7:48148 or") as caught:
        parse_address(text)

    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(("text", "port"), [("47777", 47777), (":47777", 47777), ("0", 0), (":0", 0)])
def test_a_port_alone_is_where_to_listen_not_whom_to_dial(text: str, port: int) -> None:
    """Goal: it means all addresses to a master, also where there is a usual port; a peer is told what is missing."""
    assert parse_listen_address(text) == parse_listen_address(text, 48148) == ("0.0.0.0", port)
    for usual in (None, 48148):
        with pytest.raises(ValueError, match=r"is only a port; write the host before it|must be host:port"):
            parse_address(text, usual)


@pytest.mark.parametrize("text", ["65536", ":65536", "[::1]", "10.0.0.7", "", ":", "²"])
def test_other_addresses_to_listen_on_are_as_usual(text: str) -> None:
    """Goal: only a port alone is special; a port that is none is refused."""
    with pytest.raises(ValueError, match="must be host:port"):
        parse_listen_address(text)
    assert parse_listen_address("[::1]:5") == ("::1", 5)
    assert parse_listen_address("10.0.0.7", 6) == ("10.0.0.7", 6)


@pytest.mark.parametrize("text", ["::1:48148", "[::1]48148", "fe80::1", "::"])
def test_a_bare_ipv6_address_is_ambiguous(text: str) -> None:
    """Goal: the parser does not guess which colon is meant; the error asks for brackets."""
    with pytest.raises(ValueError, match="in brackets"):
        parse_address(text, 48148)


def test_numbers_resolve_to_themselves() -> None:
    """Goal: the usual case asks no resolver and keeps the port."""
    assert resolve("127.0.0.1", 5) == [("127.0.0.1", 5)]
    assert resolve("::1", 5) == [("::1", 5)]


def test_each_address_of_a_name_comes_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the system's order of preference is kept, scopes are cut off, duplicates are removed."""
    stream = socket.SOCK_STREAM
    answer = [
        (socket.AF_INET6, stream, 6, "", ("fe80::1%eth0", 7, 0, 2)),
        (socket.AF_INET, stream, 6, "", ("10.0.0.7", 7)),
        (socket.AF_INET, stream, 6, "", ("10.0.0.7", 7)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)

    assert resolve("somewhere", 7) == [("fe80::1", 7), ("10.0.0.7", 7)]


def test_an_unknown_name_is_an_os_error() -> None:
    """Goal: callers that retry tell a name that is not known yet from a programming error."""
    with pytest.raises(OSError):
        resolve("no.such.host.invalid", 1)
